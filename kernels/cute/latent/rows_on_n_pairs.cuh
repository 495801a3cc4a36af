// How partial outputs lie where rows are on the N side and ldmatrix has transposed pairs of bytes: rows g and g + 8 of
// 16 of M are columns 2 g and 2 g + 1. For merge_tiles().
#pragma once

#include "latent/rows_on_n.cuh"

namespace hypermla::cute::latent {

// Parts of caches in e4m3 are float16 times a power of two: over the scale of the cache no normalised value exceeds
// 448, and that times this is below float16's largest number.
inline constexpr float kPartScale = 128.0f;

// How partial outputs lie: [slot][warpgroup][two of its four fragments][octet of rows][thread of a warpgroup].
template <int N>
struct RowsOnNPairs {
  static constexpr int kRows = N, kNextRow = 1, kPeriod = N / 2;
  static constexpr bool kAlike = false;
  static __device__ __forceinline__ int row(int chunk, int lane) { return chunk / 4 % (N / 8) * 8 + 2 * (lane & 3); }
  static __device__ __forceinline__ int piece(int) { return 0; }  // all have one factor
  // The lane's first column of a chunk's first fragment; the other is 64 on.
  static __device__ __forceinline__ int column(int chunk, int lane) {
    return chunk / kPeriod * 128 + (chunk & 3) * 16 + lane / 4 * 2;
  }

  struct Output {
    RowPlaces<N> rows;

    __device__ __forceinline__ Output(const LatentArguments& with, const WorkItem& item, int)
        : rows(with, item.request, item.first_row, item.row_tile * N, item.queries * with.heads) {}
    template <DType dtype>
    __device__ __forceinline__ void write(int chunk, const TwoRows& x, u32) const {
      const int at = column(chunk, lane_id()), row = RowsOnNPairs::row(chunk, lane_id());
      auto write = [&](unsigned short* row, float4 y) {
        if (!row) return;
        *reinterpret_cast<u32*>(row + at) = pack<dtype>(y.x, y.y);
        *reinterpret_cast<u32*>(row + at + 64) = pack<dtype>(y.z, y.w);
      };
      unsigned short *const first = rows.of(row), *const second = rows.of(row + kNextRow);
      write(first, x.first);
      write(second, x.second);
    }
  };
};

// Half of the columns of outputs, those of row i times scale(i); `rows` from the tile's first on exist.
template <DType dtype, int N, class Scale>
__device__ __forceinline__ void store_outputs(const LatentArguments& with, int request, int first_row, int tile_row,
                                              int rows, int half, const float (*o)[N / 2], Scale scale) {
  const int octet_row = 2 * (lane_id() & 3);
  unsigned short* const out =
      static_cast<unsigned short*>(with.o) + half * 256 + ((thread_id() >> 5) & 3) * 16 + (lane_id() >> 2) * 2;
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * i + octet_row + e;
      const float by = scale(row);
      if (row >= rows) continue;
      unsigned short* const to = out + with.o_rows.offset(request, first_row, tile_row + row);
#pragma unroll
      for (int m = 0; m < 4; ++m)
        *reinterpret_cast<u32*>(to + m * 64) = pack<dtype>(o[m][4 * i + e] * by, o[m][4 * i + 2 + e] * by);
    }
  }
}

}  // namespace hypermla::cute::latent
