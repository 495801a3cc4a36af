// Writes new tokens' rows into a paged cache of DeepSeek's FP8 form, 656 bytes a token: 512 e4m3, 4 fp32 factors of 128
// of these each, 64 bf16 for RoPE. A factor is the largest magnitude of its 128 values / 448, which is e4m3's largest
// number. Slots that the cache does not have are skipped.
//
// A warp takes a token, a lane 16 latent columns; 8 lanes share a factor.
//
// grid = ceil(tokens / 8); 256 threads. Runs on every GPU from sm_80 on.
#pragma once

#include "e4m3.h"
#include "slot.cuh"

namespace hypermla::cute {

inline constexpr float kLeastFactor = 0x1p-126f;  // of zeros, too: a normal number, by which zero can be divided

template <DType dtype>
__device__ __forceinline__ unsigned as_bfloat16(unsigned two) {
  if constexpr (dtype == DType::bfloat16) return two;
  const float2 x = unpack<dtype>(two);
  return pack<DType::bfloat16>(x.x, x.y);
}

template <DType dtype>
__global__ void __launch_bounds__(kCopyThreads) append_fp8(const __grid_constant__ AppendArguments with) {
  const unsigned token = blockIdx.x * (kCopyThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= with.tokens) return;
  const auto vector_at = [&](const void* rows, long long stride, unsigned vector) {
    return reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(rows) + token * stride)[vector];
  };
  const uint4 first = vector_at(with.latent, with.latent_stride, 2 * lane);
  const uint4 second = vector_at(with.latent, with.latent_stride, 2 * lane + 1);
  const uint4 rope = vector_at(with.rope, with.rope_stride, lane % 8);
  const Slot slot(with, token);
  if (!slot.exists) return;
  uint4* const to = slot.bytes(with.cache);

  const Sixteen x = sixteen<dtype>(first, second);
  float most = 0;
#pragma unroll
  for (const float2 two : x.pairs) most = fmaxf(most, fmaxf(fabsf(two.x), fabsf(two.y)));  // passes over NaN
#pragma unroll
  for (int step = 1; step < 8; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  const float factor = fmaxf(most / kMostE4m3, kLeastFactor);
  to[lane] = e4m3_of(x, factor);
  if (lane % 8 == 0) reinterpret_cast<float*>(to + 32)[lane / 8] = factor;
  if (lane < 8)
    to[33 + lane] = make_uint4(as_bfloat16<dtype>(rope.x), as_bfloat16<dtype>(rope.y), as_bfloat16<dtype>(rope.z),
                               as_bfloat16<dtype>(rope.w));
}

}  // namespace hypermla::cute
