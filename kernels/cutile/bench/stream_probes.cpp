// What kernels of this language measure of a device: read_GBps over 4 GiB, on a GPU power_share, and launch_us, by
// launches of a kernel with almost no work that follow each other in a recording.
#include <algorithm>

#include "cutile/bench/stream_product.h"
#include "cutile/bench/stream_read.h"
#include "hypermla/device/measure.h"
#include "hypermla/plan/inputs.h"
#include "hypermla/plan/probes.h"
#include "hypermla/roofline/kernel_time.h"

namespace hypermla {
namespace {

// Null pointers: for its source only.
CtKernel stream_read(void* data, void* sum, int rows, unsigned blocks) {
  CtKernelSpec<StreamReadProblem, StreamReadTiling> spec;
  spec.name = "stream_read";
  spec.header = "cutile/bench/stream_read.cuh";
  spec.problem = {.rows = 0};
  spec.grid = [=](const StreamReadTiling&) { return Grid{blocks, 1, 1}; };
  spec.arguments = [=](const StreamReadTiling&) { return Arguments(data, sum, rows); };
  return CtKernel(spec);
}

// One pass over `rows` rows of 1 KB.
Timing time_read(const std::shared_ptr<Device>& shared, Compiler& compiler, int rows) {
  Device& device = *shared;
  const unsigned blocks = unsigned(device.info().processors) * 2;
  const AllocatedTensors tensors(
      {{"data", Role::input, DType::float32, {rows, 256}}, {"sum", Role::output, DType::float32, {blocks}}}, shared, 1);
  CtKernel kernel = stream_read(tensors.tensors().at("data").data, tensors.tensors().at("sum").data, rows, blocks);
  kernel.prepare(compiler, device);
  return measure_hot(
      device, [&](StreamHandle stream) { kernel.run(stream); }, 10);
}

double read_gbps(const std::shared_ptr<Device>& device, Compiler& compiler) {
  const int rows = device->is_gpu() ? 4 << 20 : 512 << 10;
  const std::vector<double> seconds = time_read(device, compiler, rows).seconds;
  return 1e-9 * 1024.0 * rows / *std::min_element(seconds.begin(), seconds.end());
}

// Of a kernel with almost no work.
double launch_us(const std::shared_ptr<Device>& device, Compiler& compiler) {
  return 1e6 * time_read(device, compiler, 16).median();
}

CtKernel stream_product(void* a, void* data, void* sum, int rows, int steps, int distinct, unsigned blocks) {
  CtKernelSpec<StreamProductProblem, StreamProductTiling> spec;
  spec.name = "stream_product";
  spec.header = "cutile/bench/stream_product.cuh";
  spec.problem = {.rows = 0};
  spec.grid = [=](const StreamProductTiling&) { return Grid{blocks, 1, 1}; };
  spec.arguments = [=](const StreamProductTiling&) { return Arguments(a, data, sum, rows, steps, distinct); };
  return CtKernel(spec);
}

double power_share(const std::shared_ptr<Device>& shared, Compiler& compiler, double read_gbps) {
  Device& device = *shared;
  constexpr int kRowsOfTile = 64;
  const std::int64_t bytes = std::int64_t{4} << 30;
  const int rows = int(bytes / 256), tiles = rows / kRowsOfTile;
  const int blocks = device.info().processors * 2, steps = tiles / blocks;
  const AllocatedTensors tensors({{"a", Role::input, DType::bfloat16, {128, 64}},
                                  {"data", Role::input, DType::bfloat16, {rows, 128}},
                                  {"sum", Role::output, DType::float32, {blocks}}},
                                 shared, 1);
  const auto seconds = [&](int distinct) {
    auto data = [&](const char* name) { return tensors.tensors().at(name).data; };
    CtKernel kernel = stream_product(data("a"), data("data"), data("sum"), rows, steps, distinct, unsigned(blocks));
    kernel.prepare(compiler, device);
    return measure_sustained(
               device, [&](StreamHandle stream) { kernel.run(stream); }, 1)
        .median();
  };
  const double both = seconds(tiles), tensor = seconds(blocks);
  return power_share_of(both, tensor, double(blocks) * steps * kRowsOfTile * 256 / (read_gbps * 1e9));
}

std::vector<KernelSource> sources() {
  const CtKernel read = stream_read(nullptr, nullptr, 0, 1);
  const CtKernel product = stream_product(nullptr, nullptr, nullptr, 0, 0, 0, 1);
  return {read.source(read.tiling()), product.source(product.tiling())};
}

Json measure(const std::shared_ptr<Device>& device, Compiler& compiler) {
  Json measured = {{"read_GBps", read_gbps(device, compiler)}};
  if (device->is_gpu()) measured["power_share"] = power_share(device, compiler, measured["read_GBps"]);
  measured["launch_us"] = launch_us(device, compiler);
  return measured;
}

HYPERMLA_PROBES(sources, measure)

}  // namespace
}  // namespace hypermla
