// Merges what queries have of a prefix that is attended to once for many of them into what they have of their own
// tokens, by their log-sum-exps. Queries without such a prefix are not touched: their thread blocks leave at once.
//
// A warp takes rows of 512 columns, two at a time. grid = queries * blocks.
#pragma once

#include "hopper/constants.h"
#include "hopper/fragments.h"
#include "shared_prefixes.h"

namespace hypermla::cute {

template <DType dtype>
__global__ void __launch_bounds__(kMergePrefixThreads)
    merge_prefixes(const __grid_constant__ MergePrefixesArguments with) {
  constexpr int kVectors = 64, kTurns = kMergePrefixHeads / (kMergePrefixThreads / 32);  // of 16 bytes; rows of a warp
  const int token = blockIdx.x / with.blocks, block = blockIdx.x - token * with.blocks;
  const QueryPlace place = with.places[token];
  if (place.request < 0) return;
  const int lane = threadIdx.x % 32, head = block * kMergePrefixHeads + threadIdx.x / 32 * kTurns;
  const long long of_query = with.lse_request_stride
                                 ? place.request * with.lse_request_stride + place.query * with.lse_token_stride
                                 : token * with.lse_token_stride;
  const auto prefix_row = [&](int i) { return static_cast<long long>(token) * with.heads + head + i; };
  const auto lse_at = [&](int i) { return with.lse + of_query + (head + i) * with.lse_head_stride; };
  const auto out_at = [&](int i) {
    return reinterpret_cast<uint4*>(static_cast<unsigned short*>(with.o) + token * with.o_token_stride +
                                    (head + i) * with.o_head_stride) +
           lane;
  };

  uint4 prefix[kTurns][2], own[kTurns][2];
  float prefix_lse[kTurns], own_lse[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (head + i >= with.heads) continue;
    const uint4* from = static_cast<const uint4*>(with.prefix_o) + prefix_row(i) * kVectors + lane;
    for (int half = 0; half < 2; ++half) prefix[i][half] = from[32 * half], own[i][half] = out_at(i)[32 * half];
    prefix_lse[i] = with.prefix_lse[prefix_row(i)];
    own_lse[i] = *lse_at(i) * with.to_log2;
  }
  __syncwarp();  // all lanes have read the log-sum-exps

#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (head + i >= with.heads) continue;
    // An infinite one of either sign has no weight: its row saw nothing, or scores that are all -infinity.
    const float x = prefix_lse[i] == kInfinity ? -kInfinity : prefix_lse[i];
    const float y = own_lse[i] == kInfinity ? -kInfinity : own_lse[i];
    const float top = fmaxf(x, y);
    const float of_prefix = x == -kInfinity ? 0.0f : exp2f(x - top), of_own = y == -kInfinity ? 0.0f : exp2f(y - top);
    const float sum = of_prefix + of_own, inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const auto merged = [&](unsigned p, unsigned q) {  // two columns
      const float2 a = unpack<dtype>(p), b = unpack<dtype>(q);
      const auto sum_of = [&](float a, float b) {  // what has no weight may hold anything
        return (of_prefix == 0.0f ? 0.0f : of_prefix * inverse * a) + (of_own == 0.0f ? 0.0f : of_own * inverse * b);
      };
      return pack<dtype>(sum_of(a.x, b.x), sum_of(a.y, b.y));
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 p = prefix[i][half], q = own[i][half];
      out_at(i)[32 * half] = make_uint4(merged(p.x, q.x), merged(p.y, q.y), merged(p.z, q.z), merged(p.w, q.w));
    }
    if (lane == 0) *lse_at(i) = sum == 0.0f ? with.empty_lse : (top + log2f(sum)) * with.from_log2;
  }
}

}  // namespace hypermla::cute
