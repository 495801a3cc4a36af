// Where a new token goes in the paged cache.
#pragma once

#include "cache_ops.h"

namespace hypermla::cute {

struct Slot {
  unsigned page, in_page;
  bool exists;  // false where the cache has no such slot

  __device__ __forceinline__ Slot(const AppendArguments& with, unsigned token) {
    const CacheLayout& cache = with.cache;
    const long long slot = with.slots[token];
    exists = slot >= 0 && slot < static_cast<long long>(cache.pages) * cache.page;
    page = static_cast<unsigned>(slot) / cache.page;
    in_page = static_cast<unsigned>(slot) % cache.page;
  }
  // Of a cache in FP8.
  __device__ __forceinline__ uint4* bytes(const CacheLayout& cache) const {
    return reinterpret_cast<uint4*>(static_cast<unsigned char*>(cache.latent) + page * cache.latent_page_stride +
                                    in_page * cache.latent_token_stride);
  }
};

}  // namespace hypermla::cute
