// The rows of a work item: what all latent kernels do with them where an item begins and ends.
#pragma once

#include "hopper/rows.h"
#include "hopper/warpgroup.h"
#include "latent/arguments.h"

namespace hypermla::cute::latent {

// Tokens that the rows of an item see. Every row sees the first `by_all` of them. Blocks behind those are masked
// element by element.
template <auto problem>
struct SeenTokens {
  int masked;  // query i sees all tokens but the last masked - i - 1
  int whole;   // of the request, with those in the caches of other shards
  int by_all;

  __device__ __forceinline__ SeenTokens(const LatentArguments& with, const WorkItem& item, int queries, int tokens) {
    masked = problem.causal ? queries : 1;
    if (problem.after)
      masked = max(queries - (with.after_lengths ? with.after_lengths[uniform(item.request)] : with.after), 1);
    whole = problem.shards ? uniform(item.whole) : tokens;
    by_all = problem.shards ? with.shards.count(whole - masked + 1) : tokens - masked + 1;
  }
};

// What scores are multiplied by, in front of exponentials to base 2, where numbers in FP8 have that factor. Zeros may
// have a factor of 0: by the least normal number their scores are zeros, too, and what is masked stays -infinity.
__device__ __forceinline__ float scale_log2_of(const LatentArguments& with, float factor) {
  const float scale = with.scale_log2 * factor;
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

// What the outputs of a row of a request are divided by: of a part, the sum of its weights alone.
__device__ __forceinline__ float divisor_of(const LatentArguments& with, int slot, int row, float maximum, float sum) {
  return slot >= 0 ? sum : sum + exp2_fast(with.sink(row) - maximum);
}

// Writes the log-sum-exp of row r of the tile, as an output or to the part; `rows` from the tile's first on exist.
template <int tile_rows>
__device__ __forceinline__ void store_lse(const LatentArguments& with, int request, int first_row, int tile_row,
                                          int rows, int slot, int r, float log, float sum) {
  if (slot >= 0) {
    with.lse_part[slot * static_cast<long long>(tile_rows * part_row_floats(tile_rows)) + r] = log;
  } else if (r < rows) {
    with.lse[with.lse_rows.offset(request, first_row, tile_row + r)] =
        sum == 0.0f ? with.empty_lse : log * with.lse_unit;
  }
}

// Column 0 of row r of an item's tile among the outputs; null behind the end of the request.
template <int tile_rows>
__device__ __forceinline__ unsigned short* row_of_tile(const LatentArguments& with, const WorkItem& item, int r) {
  const int at = item.row_tile * tile_rows + r;
  if (at >= item.queries * with.heads) return nullptr;
  return static_cast<unsigned short*>(with.o) + with.o_rows.offset(item.request, item.first_row, at);
}

// The same of `count` rows from `first` of a request on, of which those from `end` on do not exist. Each lane finds a
// row or two, for all.
template <int count>
struct RowPlaces {
  unsigned short* o;
  long long own[(count + 31) / 32];  // of rows lane, lane + 32; -1: none

  __device__ __forceinline__ RowPlaces(const LatentArguments& with, int request, int first_row, int first, int end)
      : o(static_cast<unsigned short*>(with.o)) {
#pragma unroll
    for (int i = 0; i < count; i += 32) {
      const int at = first + (lane_id() + i) % count;
      own[i / 32] = at < end ? with.o_rows.offset(request, first_row, at) : -1;
    }
  }
  // All lanes of a warp ask, each for a row of its own.
  __device__ __forceinline__ unsigned short* of(int r) const {
    long long at = __shfl_sync(~0u, own[0], r & 31);
    if constexpr (count > 32) {
      const long long second = __shfl_sync(~0u, own[1], r & 31);
      if (r >= 32) at = second;
    }
    return at < 0 ? nullptr : o + at;
  }
};

// A warp copies the rows of an output that it has in shared memory, 256 columns each: rows `first` .. first + count - 1
// of the tile, of which `rows` exist. from(r): where the lane's eight columns of row first + r are.
template <int count, class From>
__device__ __forceinline__ void copy_rows(const LatentArguments& with, int request, int first_row, int tile_row,
                                          int first, int rows, int half, From from) {
  const RowPlaces<count> places(with, request, first_row, tile_row + first, tile_row + rows);
  const int column = half * 256 + lane_id() * 8;
  constexpr int kAtOnce = count < 8 ? count : 8;  // registers
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kAtOnce) {
    uint4 x[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) x[r] = load_shared(from(begin + r));
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      unsigned short* const to = places.of(begin + r);
      if (to) *reinterpret_cast<uint4*>(to + column) = x[r];
    }
  }
}

}  // namespace hypermla::cute::latent
