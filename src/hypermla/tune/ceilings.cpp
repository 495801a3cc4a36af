#include "hypermla/tune/ceilings.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <thread>

#include "hypermla/base/error.h"
#include "hypermla/plan/inputs.h"
#include "hypermla/tune/measure.h"
#include "cutile/bench/stream_product.h"
#include "cutile/bench/stream_read.h"

namespace hypermla {
namespace {

// The few calls of cuBLAS that a matrix product takes (cublas_api.h); the library is optional and found at run time.
class Matmul {
 public:
  // Empty when there is no cuBLAS.
  static std::unique_ptr<Matmul> load() {
    for (const char* name : {"libcublas.so.13", "/usr/local/cuda/lib64/libcublas.so.13"})
      if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
        std::unique_ptr<Matmul> matmul(new Matmul);
        auto find = [&](auto& function, const char* symbol) {
          function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, symbol));
          return function != nullptr;
        };
        if (find(matmul->create_, "cublasCreate_v2") && find(matmul->set_stream_, "cublasSetStream_v2") &&
            find(matmul->gemm_, "cublasGemmEx") && matmul->create_(&matmul->handle_) == 0)
          return matmul;
      }
    return nullptr;
  }
  void run(int n, const void* a, const void* b, void* c, StreamHandle stream) {
    constexpr int kTranspose = 1, kNoTranspose = 0, kBfloat16 = 14, kCompute32F = 68, kDefaultAlgorithm = -1;
    const float one = 1, zero = 0;
    set_stream_(handle_, stream);
    if (int status = gemm_(handle_, kTranspose, kNoTranspose, n, n, n, &one, a, kBfloat16, n, b, kBfloat16, n, &zero, c,
                           kBfloat16, n, kCompute32F, kDefaultAlgorithm))
      fail("cuBLAS refuses a {} x {} product (status {})", n, n, status);
  }

 private:
  int (*create_)(void**) = nullptr;
  int (*set_stream_)(void*, void*) = nullptr;
  int (*gemm_)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int, const void*,
               void*, int, int, int, int) = nullptr;
  void* handle_ = nullptr;
};

// A problem without fields of its own beyond what the probes need: lets AllocatedTensors fill memory with random numbers.
class ProbeTensors : public KernelPlan {
 public:
  explicit ProbeTensors(std::vector<TensorSpec> specs) : specs_(std::move(specs)) {}
  std::vector<FieldRef> problem_fields() override { return {}; }
  std::vector<FieldRef> tiling_fields() override { return {}; }
  void use_default_tiling() override {}
  void validate() const override {}
  DType dtype() const override { return DType::bfloat16; }
  std::vector<TensorSpec> tensors() const override { return specs_; }
  ReferenceShape reference_shape() const override { return {}; }
  ReferenceOutputs reference(std::int64_t, const InputReader&) const override { return {}; }
  std::unique_ptr<Executable> plan(const Tensors&) const override { return nullptr; }

 private:
  std::vector<TensorSpec> specs_;
};

CtKernelSpec<StreamReadProblem, StreamReadTiling> stream_read_spec() {
  CtKernelSpec<StreamReadProblem, StreamReadTiling> spec;
  spec.name = "stream_read";
  spec.header = "cutile/bench/stream_read.cuh";
  spec.problem = {.rows = 0};
  return spec;
}

double best_rate(double amount, const Timing& timing) {
  return amount / *std::min_element(timing.seconds.begin(), timing.seconds.end());
}

// One pass over `rows` rows of 1 KB.
Timing time_read(const std::shared_ptr<Device>& shared, Compiler& compiler, int rows) {
  Device& device = *shared;
  const unsigned blocks = unsigned(device.info().processors) * 2;
  ProbeTensors plan(
      {{"data", Role::input, DType::float32, {rows, 256}}, {"sum", Role::output, DType::float32, {blocks}}});
  AllocatedTensors tensors(plan, shared, 1);
  CtKernelSpec<StreamReadProblem, StreamReadTiling> spec = stream_read_spec();
  spec.grid = [=](const StreamReadTiling&) { return Grid{blocks, 1, 1}; };
  spec.arguments = [&tensors, rows](const StreamReadTiling&) {
    return Arguments(tensors.tensors().at("data").data, tensors.tensors().at("sum").data, rows);
  };
  CtKernel kernel(spec);
  kernel.prepare(compiler, device);
  return measure_hot(device, [&](StreamHandle stream) { kernel.run(stream); }, 10);
}

double read_gbps(const std::shared_ptr<Device>& device, Compiler& compiler) {
  const int rows = device->is_gpu() ? 4 << 20 : 512 << 10;
  return 1e-9 * best_rate(1024.0 * rows, time_read(device, compiler, rows));
}

// Of a kernel without work worth the name.
double launch_us(const std::shared_ptr<Device>& device, Compiler& compiler) {
  return 1e6 * time_read(device, compiler, 16).median();
}

CtKernelSpec<StreamProductProblem, StreamProductTiling> stream_product_spec() {
  CtKernelSpec<StreamProductProblem, StreamProductTiling> spec;
  spec.name = "stream_product";
  spec.header = "cutile/bench/stream_product.cuh";
  spec.problem = {.rows = 0};
  return spec;
}

double power_share(const std::shared_ptr<Device>& shared, Compiler& compiler, double read_gbps) {
  Device& device = *shared;
  constexpr int kRowsOfTile = 64;
  const std::int64_t bytes = std::int64_t{4} << 30;
  const int rows = int(bytes / 256), tiles = rows / kRowsOfTile;
  const int blocks = device.info().processors * 2, steps = tiles / blocks;
  ProbeTensors plan({{"a", Role::input, DType::bfloat16, {128, 64}},
                     {"data", Role::input, DType::bfloat16, {rows, 128}},
                     {"sum", Role::output, DType::float32, {blocks}}});
  AllocatedTensors tensors(plan, shared, 1);
  const auto seconds = [&](int distinct) {
    CtKernelSpec<StreamProductProblem, StreamProductTiling> spec = stream_product_spec();
    spec.grid = [=](const StreamProductTiling&) { return Grid{unsigned(blocks), 1, 1}; };
    spec.arguments = [=, &tensors](const StreamProductTiling&) {
      auto data = [&](const char* name) { return tensors.tensors().at(name).data; };
      return Arguments(data("a"), data("data"), data("sum"), rows, steps, distinct);
    };
    CtKernel kernel(spec);
    kernel.prepare(compiler, device);
    return measure_sustained(device, [&](StreamHandle stream) { kernel.run(stream); }, 1).median();
  };
  const double both = seconds(tiles), tensor = seconds(blocks);
  return power_share_of(both, tensor, double(blocks) * steps * kRowsOfTile * 256 / (read_gbps * 1e9));
}

// Independent chains enough to hide the latency of a multiply-add, few enough for the registers of every CPU.
constexpr int kChains = 12;

typedef float Vector16 __attribute__((vector_size(16)));
typedef float Vector32 __attribute__((vector_size(32)));
typedef float Vector64 __attribute__((vector_size(64)));

template <class Vector>
inline __attribute__((always_inline)) void fma_loop(float* sums, long iterations) {
  Vector chain[kChains], factor = {};
  factor += 0.5f;
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) chain[i] = factor + sums[i];  // all different, or the compiler keeps one
  for (long n = 0; n < iterations; ++n) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) chain[i] = chain[i] * factor + factor;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) sums[i] = chain[i][0];
}

struct FmaLoop {
  void (*run)(float* sums, long iterations);
  int lanes;
};

#if defined(__x86_64__)
__attribute__((target("avx512f"))) void fma_loop_avx512(float* sums, long n) { fma_loop<Vector64>(sums, n); }
__attribute__((target("avx2,fma"))) void fma_loop_avx2(float* sums, long n) { fma_loop<Vector32>(sums, n); }
FmaLoop widest_fma_loop() {
  if (__builtin_cpu_supports("avx512f")) return {fma_loop_avx512, 16};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {fma_loop_avx2, 8};
  return {fma_loop<Vector16>, 4};
}
#else
FmaLoop widest_fma_loop() { return {fma_loop<Vector16>, 4}; }
#endif

}  // namespace

double cpu_fma_flops(int threads) {
  constexpr long kIterations = 4'000'000;
  const FmaLoop loop = widest_fma_loop();
  double best = 0;
  for (int repetition = 0; repetition < 5; ++repetition) {
    std::vector<double> rates(threads);
    std::vector<std::array<float, kChains>> sums(threads);
    std::vector<std::thread> workers;
    for (int i = 0; i < threads; ++i)
      workers.emplace_back([&, i] {
        std::iota(sums[i].begin(), sums[i].end(), 1.0f);
        const auto begin = std::chrono::steady_clock::now();
        loop.run(sums[i].data(), kIterations);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        rates[i] = 2.0 * loop.lanes * kChains * kIterations / seconds;
      });
    for (std::thread& worker : workers) worker.join();
    best = std::max(best, std::accumulate(rates.begin(), rates.end(), 0.0));
  }
  return best;
}

std::vector<KernelSource> ceiling_sources() {
  const CtKernel read(stream_read_spec()), product(stream_product_spec());
  return {read.source(read.tiling()), product.source(product.tiling())};
}

double power_share_of(double both, double tensor, double reads) {
  return std::clamp((both - tensor) / reads, 0.01, 1.0);
}

Json measure_ceilings(std::shared_ptr<Device> device, Compiler& compiler) {
  Json measured;
  measured["read_GBps"] = read_gbps(device, compiler);
  const std::size_t bytes = device->is_gpu() ? std::size_t{4} << 30 : std::size_t{256} << 20;
  {
    Buffer from(device, bytes), to(device, bytes);
    device->fill(from.data(), 1, bytes);
    device->fill(to.data(), 2, bytes);
    Timing timing;
    for (int i = 0; i < 5; ++i) timing.seconds.push_back(device->time([&](StreamHandle) {
      device->copy(to.data(), from.data(), bytes);
      device->synchronize();
    }));
    measured["copy_GBps"] = 2e-9 * best_rate(double(bytes), timing);
  }
  if (!device->is_gpu()) {
    measured["launch_us"] = launch_us(device, compiler);
    measured["fma_gflops"] = 1e-9 * cpu_fma_flops(device->info().processors);
    return measured;
  }
  if (std::unique_ptr<Matmul> matmul = Matmul::load()) {
    constexpr int n = 8192;
    ProbeTensors plan({{"a", Role::input, DType::bfloat16, {n, n}},
                       {"b", Role::input, DType::bfloat16, {n, n}},
                       {"c", Role::output, DType::bfloat16, {n, n}}});
    AllocatedTensors tensors(plan, device, 1);
    auto product = [&](StreamHandle stream) {
      matmul->run(n, tensors.tensors().at("a").data, tensors.tensors().at("b").data, tensors.tensors().at("c").data,
                  stream);
    };
    product(device->stream());
    device->synchronize();
    const double flops = 2.0 * n * n * n;
    measured["matmul_burst_tflops"] = 1e-12 * flops / measure_burst(*device, product, 7).median();
    measured["matmul_sustained_tflops"] = 1e-12 * flops / measure_sustained(*device, product, 2).median();
  }
  measured["power_share"] = power_share(device, compiler, measured["read_GBps"]);
  measured["launch_us"] = launch_us(device, compiler);
  return measured;
}

}  // namespace hypermla
