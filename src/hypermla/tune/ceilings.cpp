#include "hypermla/tune/ceilings.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <thread>

#include "hypermla/base/error.h"
#include "hypermla/device/measure.h"
#include "hypermla/plan/inputs.h"
#include "hypermla/plan/probes.h"

namespace hypermla {
namespace {

// The calls of cuBLAS for a matrix product (cublas_api.h). The library is optional and found at run time.
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

double best_rate(double amount, const Timing& timing) {
  return amount / *std::min_element(timing.seconds.begin(), timing.seconds.end());
}

// Enough independent chains to hide the latency of a multiply-add, but few enough for the registers of every CPU.
constexpr int kChains = 12;

typedef float Vector16 __attribute__((vector_size(16)));
typedef float Vector32 __attribute__((vector_size(32)));
typedef float Vector64 __attribute__((vector_size(64)));

template <class Vector>
inline __attribute__((always_inline)) void fma_loop(float* sums, long iterations) {
  Vector chain[kChains], factor = {};
  factor += 0.5f;
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) chain[i] = factor + sums[i];  // all different, so that all are kept
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
  std::vector<KernelSource> sources;
  for (const Probes& probes : all_probes())
    for (KernelSource& source : probes.sources()) sources.push_back(std::move(source));
  return sources;
}

Json measure_ceilings(std::shared_ptr<Device> device, Compiler& compiler) {
  Json measured = Json::object();
  for (const Probes& probes : all_probes()) measured.update(probes.measure(device, compiler));
  const std::size_t bytes = device->is_gpu() ? std::size_t{4} << 30 : std::size_t{256} << 20;
  {
    Buffer from(device, bytes), to(device, bytes);
    device->fill(from.data(), 1, bytes);
    device->fill(to.data(), 2, bytes);
    Timing timing;
    for (int i = 0; i < 5; ++i)
      timing.seconds.push_back(device->time([&](StreamHandle) {
        device->copy(to.data(), from.data(), bytes);
        device->synchronize();
      }));
    measured["copy_GBps"] = 2e-9 * best_rate(double(bytes), timing);
  }
  if (!device->is_gpu()) {
    measured["fma_gflops"] = 1e-9 * cpu_fma_flops(device->info().processors);
    return measured;
  }
  if (std::unique_ptr<Matmul> matmul = Matmul::load()) {
    constexpr int n = 8192;
    const AllocatedTensors tensors({{"a", Role::input, DType::bfloat16, {n, n}},
                                    {"b", Role::input, DType::bfloat16, {n, n}},
                                    {"c", Role::output, DType::bfloat16, {n, n}}},
                                   device, 1);
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
  return measured;
}

}  // namespace hypermla
