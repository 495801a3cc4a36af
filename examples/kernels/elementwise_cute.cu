// A template for elementwise kernels in CUDA C++: y = silu(gate) * up, the activation of gated feed-forward layers.
//
//   hypermla verify-file examples/kernels/elementwise_cute.cu
//   hypermla bench-file examples/kernels/elementwise_cute.cu --vectors=4
//
// Each thread moves vectors of 16 bytes, neighbouring threads neighbouring vectors, and starts all its loads before it
// uses the first. Every vector is predicated: the last block may reach beyond the end.

#ifdef HYPERMLA_DEVICE

#include "hopper/fragments.h"

using namespace hypermla;

__device__ __forceinline__ float silu_product_of(float gate, float up) {
  return __fdividef(gate * up, 1.0f + __expf(-gate));
}

template <int vectors>
__global__ void __launch_bounds__(256)
    silu_product(const uint4* __restrict__ gate, const uint4* __restrict__ up, uint4* __restrict__ y, long long count) {
  constexpr int kElements = 8;  // of a vector: 16 bytes of bfloat16
  uint4 g[vectors], u[vectors];
  const long long first = (long long)blockIdx.x * (256 * vectors) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const long long at = first + i * 256;
    if (at < count) {
      g[i] = __ldcs(gate + at);
      u[i] = __ldcs(up + at);
    }
  }
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const long long at = first + i * 256;
    if (at >= count) break;
    const unsigned* gates = &g[i].x;
    const unsigned* ups = &u[i].x;
    uint4 result;
#pragma unroll
    for (int pair = 0; pair < kElements / 2; ++pair) {
      const float2 a = cute::unpack<DType::bfloat16>(gates[pair]), b = cute::unpack<DType::bfloat16>(ups[pair]);
      (&result.x)[pair] = cute::pack<DType::bfloat16>(silu_product_of(a.x, b.x), silu_product_of(a.y, b.y));
    }
    __stcs(y + at, result);
  }
}

#else

#include <cmath>

#include "hypermla/kernel_file.h"

using hypermla::DType;

void describe(hypermla::KernelFile& file) {
  const auto rows = file.size("rows", 65536, 333, "tokens");
  const auto columns = file.size("columns", 4096, 1000, "hidden units");
  const auto vectors = file.size("vectors", 4, 4, "vectors of a thread: 1, 2 or 4");
  const auto n = rows * columns, of_block = 256 * 8 * vectors;
  const int gate = file.input("gate", DType::bfloat16, {rows, columns}, 8);
  const int up = file.input("up", DType::bfloat16, {rows, columns}, 8);
  const int y = file.output("y", DType::bfloat16, {rows, columns}, 8);
  file.kernel("cute", "silu_product<" + std::to_string(vectors) + ">");
  file.launch((n + of_block - 1) / of_block, 1, 1, 256);
  file.pass(gate);
  file.pass(up);
  file.pass(y);
  file.pass_value(static_cast<long long>(n / 8));
  file.work(5.0 * n, 6.0 * n);
}

void reference(const hypermla::Row& at) {
  const auto columns = at.size(1);
  const auto gate = at.input(0), up = at.input(1);
  for (std::int64_t j = 0; j < columns; ++j) {
    const double x = gate[at.row * columns + j];
    at.output(0)[j] = x / (1 + std::exp(-x)) * up[at.row * columns + j];
  }
}

HYPERMLA_KERNEL_FILE(describe, reference)

#endif
