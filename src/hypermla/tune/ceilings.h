// The ceilings of a device, measured: kernels are judged by the part of them that they reach.
#pragma once

#include "hypermla/compile/compiler.h"
#include "hypermla/device/device.h"

namespace hypermla {

// What the probes measure (plan/probes.h), and copy_GBps. On a GPU that is the driver's copy, and there are
// matmul_{burst,sustained}_tflops of an 8192^3 bfloat16 product by cuBLAS where that library is found. On a CPU there
// is fma_gflops of fp32 fused multiply-adds on all cores. Keys as in roofline/device_spec.h.
Json measure_ceilings(std::shared_ptr<Device> device, Compiler& compiler);

// The kernels of the probes, to be compiled ahead of time.
std::vector<KernelSource> ceiling_sources();

// fp32 multiply-adds in registers on `threads` threads, in FLOP/s: the best of several short runs.
double cpu_fma_flops(int threads);

}  // namespace hypermla
