// A template for reductions in CUDA C++: the root mean square of every row, as RMSNorm needs it.
//
//   hypermla verify-file examples/kernels/reduction_cute.cu
//   hypermla bench-file examples/kernels/reduction_cute.cu
//
// One warp takes a row, in vectors of 16 bytes of which each lane has several on their way at once. The lanes' sums
// meet in shuffles, so warps never wait for each other. Every vector and the row itself are predicated.

#ifdef HYPERMLA_DEVICE

#include "hopper/fragments.h"

using namespace hypermla;

__device__ __forceinline__ float sum_of_squares(uint4 vector) {
  float sum = 0;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const float2 x = cute::unpack<DType::bfloat16>((&vector.x)[pair]);
    sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
  }
  return sum;
}

template <int vectors>
__global__ void __launch_bounds__(256)
    root_mean_square(const uint4* __restrict__ x, float* __restrict__ y, int rows, int columns) {
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;  // a whole warp
  const int of_row = columns / 8;
  const uint4* __restrict__ from = x + (long long)row * of_row;
  float sum = 0;
  for (int first = lane; first < of_row; first += 32 * vectors) {
    uint4 loaded[vectors];
#pragma unroll
    for (int i = 0; i < vectors; ++i)
      loaded[i] = first + 32 * i < of_row ? __ldcs(from + first + 32 * i) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < vectors; ++i) sum += sum_of_squares(loaded[i]);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (lane == 0) y[row] = sqrtf(sum / static_cast<float>(columns));
}

#else

#include <cmath>

#include "hypermla/kernel_file.h"

using hypermla::DType;

void describe(hypermla::KernelFile& file) {
  const auto rows = file.size("rows", 65536, 333, "tokens");
  const auto columns = file.size("columns", 8192, 1000, "hidden units");
  const auto vectors = file.size("vectors", 8, 8, "vectors of a lane on their way at once");
  const int x = file.input("x", DType::bfloat16, {rows, columns}, 8);
  const int y = file.output("y", DType::float32, {rows}, 1);
  file.kernel("cute", "root_mean_square<" + std::to_string(vectors) + ">");
  file.launch((rows + 7) / 8, 1, 1, 256);
  file.pass(x);
  file.pass(y);
  file.pass_value(static_cast<int>(rows));
  file.pass_value(static_cast<int>(columns));
  file.work(2.0 * rows * columns, 2.0 * rows * columns + 4.0 * rows);
}

void reference(const hypermla::Row& at) {
  const auto columns = at.size(1);
  const auto x = at.input(0);
  double sum = 0;
  for (std::int64_t j = 0; j < columns; ++j) sum += x[at.row * columns + j] * x[at.row * columns + j];
  at.output(0)[0] = std::sqrt(sum / double(columns));
}

HYPERMLA_KERNEL_FILE(describe, reference)

#endif
