// Writes new tokens' rows into a paged cache of 576 bytes a token: 512 latent and 64 rotary values as e4m3, with one
// factor for all tokens, which lies in the device's memory. What is beyond 448 factors becomes 448. Slots that the
// cache does not have are skipped.
//
// A thread takes 16 values. grid = ceil(tokens * 36 / 256); 256 threads. Runs on every GPU from sm_80 on.
#pragma once

#include "e4m3.h"
#include "slot.cuh"

namespace hypermla::cute {

template <DType dtype>
__global__ void __launch_bounds__(kCopyThreads) append_fp8_576(const __grid_constant__ AppendArguments with) {
  const unsigned i = blockIdx.x * kCopyThreads + threadIdx.x, token = i / kFp8RowVectors, vector = i % kFp8RowVectors;
  if (token >= with.tokens) return;
  const bool rope = vector >= 32;
  const uint4* const from =
      reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(rope ? with.rope : with.latent) +
                                     token * (rope ? with.rope_stride : with.latent_stride)) +
      2 * (rope ? vector - 32 : vector);
  const uint4 first = from[0], second = from[1];
  const Slot slot(with, token);
  if (!slot.exists) return;
  uint4* const to = slot.bytes(with.cache);
  to[vector] = e4m3_of(sixteen<dtype>(first, second), *with.scale);
}

}  // namespace hypermla::cute
