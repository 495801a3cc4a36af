// Writes new tokens' rows into the paged cache: a thread copies 16 bytes. Slots that the cache does not have are
// skipped.
//
// grid = ceil(tokens * 72 / 256); 256 threads. Runs on every GPU.
#pragma once

#include "slot.cuh"

namespace hypermla::cute {

__global__ void __launch_bounds__(kCopyThreads) append(const __grid_constant__ AppendArguments with) {
  const unsigned i = blockIdx.x * kCopyThreads + threadIdx.x, token = i / kRowVectors, vector = i % kRowVectors;
  if (token >= with.tokens) return;
  const CacheLayout& cache = with.cache;
  const bool rope = vector >= 64;
  const int column = 8 * (rope ? vector - 64 : vector);
  const uint4 x = *reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(rope ? with.rope : with.latent) +
                                                  token * (rope ? with.rope_stride : with.latent_stride) + column);
  const Slot slot(with, token);
  if (!slot.exists) return;
  *reinterpret_cast<uint4*>(static_cast<unsigned short*>(rope ? cache.rope : cache.latent) +
                            slot.page * (rope ? cache.rope_page_stride : cache.latent_page_stride) +
                            slot.in_page * (rope ? cache.rope_token_stride : cache.latent_token_stride) + column) = x;
}

}  // namespace hypermla::cute
