// A tensor map: what the copy engine (TMA) of Hopper and later GPUs needs to know of a tensor to move boxes of it
// between global and shared memory. The host makes it and passes it to kernels by value. Read by the host and by the
// device compilers, so it includes nothing.
#pragma once

namespace hypermla {

// The driver's CUtensorMap: opaque, 128 bytes, aligned to 64.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

}  // namespace hypermla
