// Merges two partial attentions by their log-sum-exp. Memory bounds it: a thread takes 16 bytes of a row of each part,
// and a block whole rows, so that a result may be written in place.
//
// grid = ceil(rows / (256 / vectors)); 256 threads. Runs on every GPU from sm_80 on.
#pragma once

#include "cache_ops.h"
#include "hopper/constants.h"
#include "hopper/fragments.h"

namespace hypermla::cute {

template <DType dtype>
__global__ void __launch_bounds__(kCopyThreads) merge_states(const __grid_constant__ MergeStatesArguments with) {
  const unsigned rows_of_block = kCopyThreads / with.vectors;
  const unsigned row_of_block = threadIdx.x / with.vectors, vector = threadIdx.x % with.vectors;
  const unsigned row = blockIdx.x * rows_of_block + row_of_block;
  const bool exists = row_of_block < rows_of_block && row < with.rows;
  const unsigned token = row / with.heads, head = row % with.heads;
  auto vector_at = [&](const MergeStatesArguments::Rows& of) {
    return reinterpret_cast<uint4*>(static_cast<unsigned short*>(of.data) + token * of.token_stride +
                                    head * of.head_stride) +
           vector;
  };
  auto lse_at = [&](const MergeStatesArguments::Rows& of) {
    return static_cast<float*>(of.data) + token * of.token_stride + head * of.head_stride;
  };

  uint4 a = {}, b = {};
  float lse_a = -kInfinity, lse_b = -kInfinity;
  if (exists) {
    a = *vector_at(with.o_a);
    b = *vector_at(with.o_b);
    lse_a = *lse_at(with.lse_a);
    lse_b = *lse_at(with.lse_b);
  }
  __syncthreads();  // all threads of a row have read its log-sum-exps, which may be written in place
  if (!exists) return;

  // An infinite log-sum-exp of either sign marks an empty part. What is NaN stays NaN.
  if (lse_a == kInfinity) lse_a = -kInfinity;
  if (lse_b == kInfinity) lse_b = -kInfinity;
  const float top = fmaxf(lse_a, lse_b);
  const float weight_a = lse_a == -kInfinity ? 0.0f : exp2f((lse_a - top) * with.to_log2);
  const float weight_b = lse_b == -kInfinity ? 0.0f : exp2f((lse_b - top) * with.to_log2);
  const float sum = weight_a + weight_b;
  const float share_a = weight_a == 0.0f ? 0.0f : weight_a / sum, share_b = weight_b == 0.0f ? 0.0f : weight_b / sum;
  auto merged = [&](unsigned x, unsigned y) {  // two columns
    const float2 p = unpack<dtype>(x), q = unpack<dtype>(y);
    auto sum_of = [&](float p, float q) {  // what has no weight may hold anything
      return (share_a == 0.0f ? 0.0f : share_a * p) + (share_b == 0.0f ? 0.0f : share_b * q);
    };
    return pack<dtype>(sum_of(p.x, q.x), sum_of(p.y, q.y));
  };
  *vector_at(with.o) = make_uint4(merged(a.x, b.x), merged(a.y, b.y), merged(a.z, b.z), merged(a.w, b.w));
  if (vector == 0 && with.lse.data)
    *lse_at(with.lse) = sum == 0.0f ? with.empty_lse : top + log2f(sum) * with.from_log2;
}

}  // namespace hypermla::cute
