// The softmax of scores that a warpgroup holds as fragments (wgmma.h), step by step: running maximum, mask, weights,
// rescale, and the outputs on their way to memory. Maxima are in units of log2, that is of score * scale * log2 e.
//
// Rows on M: thread t holds columns 8i + 2 * (t % 4) and the one after it, of rows r and r + 8 at [4i], [4i + 1] and
// [4i + 2], [4i + 3]. Four neighbouring threads share their rows; a value of both rows is a float2. Rows on N (the
// products are transposed): thread t holds tokens or columns r and r + 8, of rows 8i + 2 * (t % 4) and the one after it
// at [4i], [4i + 2] and [4i + 1], [4i + 3]. All threads of a warpgroup with the same t % 4 share their rows.
#pragma once

#include "constants.h"
#include "fragments.h"
#include "warpgroup.h"

namespace hypermla::cute {

// 2^(before - after), by which sums and outputs are multiplied when the running maximum rises.
__device__ __forceinline__ float rescale_factor(float before, float after) {
  return exp2_fast(fmaxf(before - after, kLeastExponent));
}

// ---- Rows on M. n: elements of a thread.

// Where in a box a lane loads or stores fragments of 16 rows from `first` on: row lane % 16, columns 8 (lane / 16) on.
// The next 16 columns are 1 << 5 exclusive or.
__device__ __forceinline__ u32 place_of_row(int first, int lane) { return swizzled(first + (lane & 15), lane >> 4); }

// The largest scores among the thread's own.
template <int n>
__device__ __forceinline__ float2 largest_scores(const float* p) {
  float a = fmaxf(p[0], p[1]), b = fmaxf(p[2], p[3]);
#pragma unroll
  for (int i = 4; i < n; i += 4) {
    a = fmaxf(a, fmaxf(p[i], p[i + 1]));
    b = fmaxf(b, fmaxf(p[i + 2], p[i + 3]));
  }
  return {a, b};
}

// Raises the running maxima to the threads' largest scores, where those are larger. Returns the rescale factors.
__device__ __forceinline__ float2 raise_maxima(float2& maximum, float2 largest, float scale_log2) {
  float a = largest.x, b = largest.y;
  a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
  b = fmaxf(b, __shfl_xor_sync(~0u, b, 1));
  a = fmaxf(maximum.x, fmaxf(a, __shfl_xor_sync(~0u, a, 2)) * scale_log2);
  b = fmaxf(maximum.y, fmaxf(b, __shfl_xor_sync(~0u, b, 2)) * scale_log2);
  const float2 factors = {rescale_factor(maximum.x, a), rescale_factor(maximum.y, b)};
  maximum = {a, b};
  return factors;
}

// Hides the scores that lie `seen` or more columns behind the thread's first one: seen.x in row r, seen.y in row r + 8.
template <int n>
__device__ __forceinline__ void mask_rows(float* p, int2 seen) {
#pragma unroll
  for (int i = 0; i < n / 4; ++i) {
    p[4 * i] = 8 * i < seen.x ? p[4 * i] : -kInfinity;
    p[4 * i + 1] = 8 * i + 1 < seen.x ? p[4 * i + 1] : -kInfinity;
    p[4 * i + 2] = 8 * i < seen.y ? p[4 * i + 2] : -kInfinity;
    p[4 * i + 3] = 8 * i + 1 < seen.y ? p[4 * i + 3] : -kInfinity;
  }
}

// Scores to weights, in place; adds the thread's own to `sum`.
template <int n>
__device__ __forceinline__ void weigh_rows(float* p, float scale_log2, float2 maximum, float2& sum) {
#pragma unroll
  for (int i = 0; i < n; i += 4) {
    p[i] = exp2_fast(fmaf(p[i], scale_log2, -maximum.x));
    p[i + 1] = exp2_fast(fmaf(p[i + 1], scale_log2, -maximum.x));
    sum.x += p[i] + p[i + 1];
    p[i + 2] = exp2_fast(fmaf(p[i + 2], scale_log2, -maximum.y));
    p[i + 3] = exp2_fast(fmaf(p[i + 3], scale_log2, -maximum.y));
    sum.y += p[i + 2] + p[i + 3];
  }
}

template <int n>
__device__ __forceinline__ void rescale_rows(float* o, float2 factors) {
#pragma unroll
  for (int i = 0; i < n; i += 4) {
    o[i] *= factors.x;
    o[i + 1] *= factors.x;
    o[i + 2] *= factors.y;
    o[i + 3] *= factors.y;
  }
}

// The sums of the four threads that share the rows.
__device__ __forceinline__ float2 sum_of_rows(float2 sum) {
  sum.x += __shfl_xor_sync(~0u, sum.x, 1);
  sum.y += __shfl_xor_sync(~0u, sum.y, 1);
  sum.x += __shfl_xor_sync(~0u, sum.x, 2);
  sum.y += __shfl_xor_sync(~0u, sum.y, 2);
  return sum;
}

// The largest magnitudes of the rows, over the four threads that share them.
template <int n>
__device__ __forceinline__ float2 largest_of_rows(const float* o) {
  float a = 0.0f, b = 0.0f;
#pragma unroll
  for (int i = 0; i < n; i += 4) {
    a = fmaxf(a, fmaxf(fabsf(o[i]), fabsf(o[i + 1])));
    b = fmaxf(b, fmaxf(fabsf(o[i + 2]), fabsf(o[i + 3])));
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    a = fmaxf(a, __shfl_xor_sync(~0u, a, step));
    b = fmaxf(b, __shfl_xor_sync(~0u, b, step));
  }
  return {a, b};
}

// The log-sum-exp in units of log2; -inf where no token is seen.
__device__ __forceinline__ float log_sum(float maximum, float sum) {
  return sum == 0.0f ? -kInfinity : maximum + log2_fast(sum);
}

// 128 columns of row r (half 0) or r + 8 (half 1) of `o`, times `factor`, to global memory: `row` is the row's first
// column. Four threads hold two columns each: they exchange among four such groups, so that each stores 16 bytes. All
// threads of the warp call it, also those with nothing to store.
template <DType dtype>
__device__ __forceinline__ void store_row(unsigned short* row, const float* o, int half, float factor, bool exists) {
  const int lane = lane_id() & 3;
  auto exchange = [&](u32& low, u32& high, int bit) {
    const u32 other = __shfl_xor_sync(~0u, lane & bit ? low : high, bit);
    (lane & bit ? low : high) = other;
  };
  uint4* out = reinterpret_cast<uint4*>(row) + lane;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* from = o + 16 * i + 4 * j + 2 * half;
      x[j] = pack<dtype>(from[0] * factor, from[1] * factor);
    }
    exchange(x[0], x[1], 1);
    exchange(x[2], x[3], 1);
    exchange(x[0], x[2], 2);
    exchange(x[1], x[3], 2);
    if (exists) out[i * 4] = make_uint4(x[0], x[1], x[2], x[3]);
  }
}

// ---- Rows on N.

// Where in a box of N rows a lane of a warp of the warpgroup stores: row 8 * (lane / 16) + lane % 8 of two groups of 8
// rows.
__device__ __forceinline__ u32 place_of_lane(int warp, int lane) {
  return swizzled((lane >> 4) * 8 + (lane & 7), 2 * warp + (lane >> 3 & 1));
}

// A (64, N) fragment, transposed, to a box of N rows and 64 columns; `to`: the box + place_of_lane().
template <DType dtype, int N>
__device__ __forceinline__ void store_rows_on_n(u32 to, const float* d) {
#pragma unroll
  for (int i = 0; i < N / 2; i += 8) {
    store_transposed(to + i * 256, pack<dtype>(d[i], d[i + 1]), pack<dtype>(d[i + 2], d[i + 3]),
                     pack<dtype>(d[i + 4], d[i + 5]), pack<dtype>(d[i + 6], d[i + 7]));
  }
}

// The largest numbers of two rows, among those of the 8 lanes of a warp that share them.
__device__ __forceinline__ float2 largest_of_lanes(float2 x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    x.x = fmaxf(x.x, __shfl_xor_sync(~0u, x.x, step));
    x.y = fmaxf(x.y, __shfl_xor_sync(~0u, x.y, step));
  }
  return x;
}

// The largest magnitudes of the rows of [4i] and [4i + 1], among the warp's columns of `tiles` fragments.
template <int tiles, int n>
__device__ __forceinline__ float2 largest_of_columns(const float (*o)[n], int i) {
  float a = 0.0f, b = 0.0f;
#pragma unroll
  for (int m = 0; m < tiles; ++m) {
    const float* const x = o[m] + 4 * i;
    a = fmaxf(a, fmaxf(fabsf(x[0]), fabsf(x[2])));
    b = fmaxf(b, fmaxf(fabsf(x[1]), fabsf(x[3])));
  }
  return largest_of_lanes({a, b});
}

// The running maxima and sums of N rows, each thread its own: rows 8i + 2 * (t % 4) and the one after it at [2i], [2i +
// 1].
template <int N>
struct RowsOnN {
  int warp, lane;                    // of the thread in its warpgroup
  float maximum[N / 4], sum[N / 4];  // sum: of the thread's own weights

  __device__ __forceinline__ RowsOnN(int warp, int lane) : warp(warp), lane(lane) {}
  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      maximum[i] = kLeastScore;
      sum[i] = 0.0f;
    }
  }

  // Scores to weights, in place. Where a score exceeds its running maximum by more than kRescaleThreshold, all maxima
  // rise, and the `tiles` outputs o are rescaled: `vote` is the named barrier that decides it, `meet` the one at which
  // the warps have left their largest scores in `of_warps`.
  template <int tiles>
  __device__ __forceinline__ void weigh(float* p, float (&o)[tiles][N / 2], float scale_log2,
                                        float2 (&of_warps)[4][N / 2], int vote, int meet) {
    bool raise = false;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      raise |= fmaf(fmaxf(p[4 * i], p[4 * i + 2]), scale_log2, -maximum[2 * i]) > kRescaleThreshold;
      raise |= fmaf(fmaxf(p[4 * i + 1], p[4 * i + 3]), scale_log2, -maximum[2 * i + 1]) > kRescaleThreshold;
    }
    if (named_any(vote, 128, raise)) raise_maxima(p, o, scale_log2, of_warps, meet);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) p[4 * i + j] = exp2_fast(fmaf(p[4 * i + j], scale_log2, -maximum[2 * i + (j & 1)]));
      sum[2 * i] += p[4 * i] + p[4 * i + 2];
      sum[2 * i + 1] += p[4 * i + 1] + p[4 * i + 3];
    }
  }

  // The sums of the warp to of_warps.
  __device__ __forceinline__ void store_sums(float2 (&of_warp)[N / 2]) const {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      float a = sum[2 * i], b = sum[2 * i + 1];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        a += __shfl_xor_sync(~0u, a, step);
        b += __shfl_xor_sync(~0u, b, step);
      }
      if (lane < 4) of_warp[4 * i + lane] = {a, b};
    }
  }

 private:
  template <int tiles>
  __device__ __forceinline__ void raise_maxima(const float* p, float (&o)[tiles][N / 2], float scale_log2,
                                               float2 (&of_warps)[4][N / 2], int meet) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const float2 largest = largest_of_lanes({fmaxf(p[4 * i], p[4 * i + 2]), fmaxf(p[4 * i + 1], p[4 * i + 3])});
      if (lane < 4) of_warps[warp][4 * i + lane] = largest;
    }
    named_sync(meet, 128);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      float2 best = of_warps[0][4 * i + (lane & 3)];
#pragma unroll
      for (int w = 1; w < 4; ++w) {
        const float2 other = of_warps[w][4 * i + (lane & 3)];
        best = {fmaxf(best.x, other.x), fmaxf(best.y, other.y)};
      }
      const float a = fmaxf(maximum[2 * i], best.x * scale_log2), b = fmaxf(maximum[2 * i + 1], best.y * scale_log2);
      const float x = rescale_factor(maximum[2 * i], a), y = rescale_factor(maximum[2 * i + 1], b);
      maximum[2 * i] = a;
      maximum[2 * i + 1] = b;
      sum[2 * i] *= x;
      sum[2 * i + 1] *= y;
#pragma unroll
      for (int m = 0; m < tiles; ++m) {
        o[m][4 * i] *= x;
        o[m][4 * i + 1] *= y;
        o[m][4 * i + 2] *= x;
        o[m][4 * i + 3] *= y;
      }
    }
  }
};

}  // namespace hypermla::cute
