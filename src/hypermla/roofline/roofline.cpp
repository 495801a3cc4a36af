#include "hypermla/roofline/roofline.h"

#include <algorithm>

#include "hypermla/base/error.h"

namespace hypermla {
namespace {

double bandwidth_of(const DeviceSpec& spec) {
  if (!(spec.peak_gbps > 0)) {
    fail(
        "the memory bandwidth of device '{}' is not known: run `hypermla device --measure`, or add peak_dram_bw_GBps "
        "to "
        "its entry in devices.json",
        spec.name);
  }
  return spec.peak_gbps;
}

}  // namespace

std::string_view bound_name(Bound bound) { return bound == Bound::compute ? "compute" : "memory"; }

Prediction predict(const Cost& cost, double peak_tflops, double peak_gbps) {
  if (!(peak_tflops > 0) || !(peak_gbps > 0))
    fail("a prediction needs positive peaks, not {} TFLOP/s and {} GB/s", peak_tflops, peak_gbps);
  Prediction prediction;
  prediction.compute_seconds = cost.flops / (peak_tflops * cost.product_rate() * 1e12);
  prediction.memory_seconds = cost.bytes / (peak_gbps * 1e9);
  prediction.seconds = std::max(prediction.compute_seconds, prediction.memory_seconds);
  prediction.bound = prediction.compute_seconds > prediction.memory_seconds ? Bound::compute : Bound::memory;
  return prediction;
}

Prediction predict(const Cost& cost, const DeviceSpec& spec, DType dtype) {
  return predict(cost, spec.peak_tflops(dtype), bandwidth_of(spec));
}

double ridge(const DeviceSpec& spec, DType dtype) {
  return spec.peak_tflops(dtype) * 1e12 / (bandwidth_of(spec) * 1e9);
}

}  // namespace hypermla
