// Writes new tokens' rows into a paged cache of DeepSeek's FP8 form, 656 bytes a token: 512 e4m3, 4 fp32 factors of 128
// of these each, 64 bf16 for RoPE. A factor is the largest magnitude of its 128 values / 448, which is e4m3's largest
// number. Slots that the cache does not have are skipped.
//
// A warp takes a token, a lane 16 latent columns; 8 lanes share a factor. Values are divided by it, not multiplied by
// its reciprocal: so they are rounded as other libraries round them, and their caches have the same bytes.
//
// grid = ceil(tokens / 8); 256 threads. Runs on every GPU from sm_80 on.
#pragma once

#include "cache_ops.h"
#include "hopper/fragments.h"

namespace hypermla::cute {

inline constexpr float kMostE4m3 = 448.0f;
inline constexpr float kLeastFactor = 0x1p-126f;  // of zeros, too: a normal number, by which zero can be divided

// Two numbers as e4m3, the first in the low byte: to nearest, ties to even, beyond 448 to 448. NaN stays NaN.
__device__ __forceinline__ unsigned pack_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
  unsigned short packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
#else
  const auto e4m3 = [](float x) {
    if (x != x) return 0x7f;
    const int sign = __float_as_int(x) >> 24 & 0x80;
    const float magnitude = fminf(fabsf(x), kMostE4m3);
    if (magnitude < 0x1p-6f) return sign | static_cast<int>(rintf(magnitude * 0x1p9f));  // multiples of 2^-9
    const int bits = __float_as_int(magnitude) - (120 << 23);  // the exponent's bias: 7 instead of 127
    return sign | (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
  };
  return static_cast<unsigned>(e4m3(low) | e4m3(high) << 8);
#endif
}

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
  const long long slot = with.slots[token];
  const CacheLayout& cache = with.cache;
  if (slot < 0 || slot >= static_cast<long long>(cache.pages) * cache.page) return;
  const unsigned page = static_cast<unsigned>(slot) / cache.page, in_page = static_cast<unsigned>(slot) % cache.page;
  unsigned char* const to =
      static_cast<unsigned char*>(cache.latent) + page * cache.latent_page_stride + in_page * cache.latent_token_stride;

  const unsigned pairs[] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  float2 x[8];
  float most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = unpack<dtype>(pairs[i]);
    most = fmaxf(most, fmaxf(fabsf(x[i].x), fabsf(x[i].y)));  // passes over NaN
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  const float factor = fmaxf(most / kMostE4m3, kLeastFactor);
  const auto four = [&](int i) {
    return pack_e4m3(x[i].x / factor, x[i].y / factor) | pack_e4m3(x[i + 1].x / factor, x[i + 1].y / factor) << 16;
  };
  reinterpret_cast<uint4*>(to)[lane] = make_uint4(four(0), four(2), four(4), four(6));
  if (lane % 8 == 0) reinterpret_cast<float*>(to + 512)[lane / 8] = factor;
  if (lane < 8)
    reinterpret_cast<uint4*>(to + 528)[lane] = make_uint4(as_bfloat16<dtype>(rope.x), as_bfloat16<dtype>(rope.y),
                                                          as_bfloat16<dtype>(rope.z), as_bfloat16<dtype>(rope.w));
}

}  // namespace hypermla::cute
