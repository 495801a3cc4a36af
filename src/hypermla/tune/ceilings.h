// What a device reaches at best: the denominators that kernels are judged by, measured in the same run.
#pragma once

#include "hypermla/compile/compiler.h"
#include "hypermla/device/device.h"

namespace hypermla {

// On a GPU: read_GBps over 4 GiB (kernels/cutile/bench/stream_read.cuh), copy_GBps of the driver's copy, and
// matmul_{burst,sustained}_tflops of an 8192^3 bfloat16 product by cuBLAS where that library is found. On a CPU: read_GBps
// by the same kernel, copy_GBps, and fma_gflops of fp32 fused multiply-adds on all cores. Keys as in roofline/device_spec.h.
Json measure_ceilings(std::shared_ptr<Device> device, Compiler& compiler);

// The kernel that this needs, to be compiled ahead of time.
KernelSource stream_read_source();

// fp32 multiply-adds in registers on `threads` threads, in FLOP/s: the best of several short runs.
double cpu_fma_flops(int threads);

}  // namespace hypermla
