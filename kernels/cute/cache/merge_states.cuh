// Merges two partial attentions by their log-sum-exp. Memory bounds it: a thread takes 16 bytes of each of kMergeTurns
// rows of both parts, and a block whole rows, so that a result may be written in place.
//
// grid = ceil(rows / (kMergeTurns * (kCopyThreads / vectors))); kCopyThreads threads. Runs on every GPU from sm_80 on.
#pragma once

#include "cache_ops.h"
#include "hopper/constants.h"
#include "hopper/fragments.h"

namespace hypermla::cute {

template <DType dtype>
__global__ void __launch_bounds__(kCopyThreads) merge_states(const __grid_constant__ MergeStatesArguments with) {
  const unsigned rows_at_once = kCopyThreads / with.vectors;
  const unsigned place = threadIdx.x / with.vectors, vector = threadIdx.x % with.vectors;
  const unsigned first_row = blockIdx.x * kMergeTurns * rows_at_once + place;
  auto exists = [&](unsigned row) { return place < rows_at_once && row < with.rows; };
  auto lse_at = [&](const MergeStatesArguments::Rows& of, unsigned row) {
    const unsigned token = row / with.heads;
    return static_cast<float*>(of.data) + token * of.token_stride + (row - token * with.heads) * of.head_stride;
  };
  auto vector_at = [&](const MergeStatesArguments::Rows& of, unsigned row) {
    const unsigned token = row / with.heads;
    return reinterpret_cast<uint4*>(static_cast<unsigned short*>(of.data) + token * of.token_stride +
                                    (row - token * with.heads) * of.head_stride) +
           vector;
  };

  uint4 a[kMergeTurns], b[kMergeTurns];
  float lse_a[kMergeTurns], lse_b[kMergeTurns];
#pragma unroll
  for (int i = 0; i < kMergeTurns; ++i) {
    const unsigned row = first_row + i * rows_at_once;
    if (!exists(row)) continue;
    a[i] = *vector_at(with.o_a, row);
    b[i] = *vector_at(with.o_b, row);
    lse_a[i] = *lse_at(with.lse_a, row);
    lse_b[i] = *lse_at(with.lse_b, row);
  }
  __syncthreads();  // all threads of a row have read its log-sum-exps, which may be written in place

#pragma unroll
  for (int i = 0; i < kMergeTurns; ++i) {
    const unsigned row = first_row + i * rows_at_once;
    if (!exists(row)) continue;
    // An infinite log-sum-exp of either sign marks an empty part. What is NaN stays NaN.
    const float x = lse_a[i] == kInfinity ? -kInfinity : lse_a[i], y = lse_b[i] == kInfinity ? -kInfinity : lse_b[i];
    const float top = fmaxf(x, y);
    const float weight_a = x == -kInfinity ? 0.0f : exp2f((x - top) * with.to_log2);
    const float weight_b = y == -kInfinity ? 0.0f : exp2f((y - top) * with.to_log2);
    const float sum = weight_a + weight_b;
    const float share_a = weight_a == 0.0f ? 0.0f : weight_a / sum, share_b = weight_b == 0.0f ? 0.0f : weight_b / sum;
    auto merged = [&](unsigned x, unsigned y) {  // two columns
      const float2 p = unpack<dtype>(x), q = unpack<dtype>(y);
      auto sum_of = [&](float p, float q) {  // what has no weight may hold anything
        return (share_a == 0.0f ? 0.0f : share_a * p) + (share_b == 0.0f ? 0.0f : share_b * q);
      };
      return pack<dtype>(sum_of(p.x, q.x), sum_of(p.y, q.y));
    };
    *vector_at(with.o, row) =
        make_uint4(merged(a[i].x, b[i].x), merged(a[i].y, b[i].y), merged(a[i].z, b[i].z), merged(a[i].w, b[i].w));
    if (vector == 0 && with.lse.data)
      *lse_at(with.lse, row) = sum == 0.0f ? with.empty_lse : top + log2f(sum) * with.from_log2;
  }
}

}  // namespace hypermla::cute
