// What a device reaches at best: the denominators that kernels are judged by, measured in the same run.
#pragma once

#include "hypermla/compile/compiler.h"
#include "hypermla/device/device.h"

namespace hypermla {

// On a GPU: read_GBps over 4 GiB (kernels/cutile/bench/stream_read.cuh), copy_GBps of the driver's copy, and
// matmul_{burst,sustained}_tflops of an 8192^3 bfloat16 product by cuBLAS where that library is found, and power_share
// (kernels/cutile/bench/stream_product.cuh). On a CPU: read_GBps by the same kernel, copy_GBps, and fma_gflops of fp32 fused
// multiply-adds on all cores. On both launch_us, of a kernel that has next to nothing to do, one behind the other in a
// recording. Keys as in roofline/device_spec.h.
Json measure_ceilings(std::shared_ptr<Device> device, Compiler& compiler);

// The kernels that this needs, to be compiled ahead of time.
std::vector<KernelSource> ceiling_sources();

// a in tensor + a reads = both, which is how a device under its power cap divides its time: from the seconds of one kernel
// that does both, of its tensor work alone, and of its reads at the full rate. From 0.01 to 1, whatever the noise.
double power_share_of(double both, double tensor, double reads);

// fp32 multiply-adds in registers on `threads` threads, in FLOP/s: the best of several short runs.
double cpu_fma_flops(int threads);

}  // namespace hypermla
