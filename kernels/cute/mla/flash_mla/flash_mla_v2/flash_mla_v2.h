// Attention in the latent space, hand-scheduled for Hopper (sm_90a), tokens in FP8 gathered by eight warps: the tiling.
// Read by the host and, as a template argument of the kernel, by the device compiler.
#pragma once

#include "mla/latent/latent.h"

namespace hypermla::cute {

inline constexpr unsigned kFlashMlaV2SharedBytes = 224080;  // of a thread block, see the kernel's Shared
inline constexpr unsigned kFlashMlaV2Threads = 384, kFlashMlaV2Fp8Threads = 512;

struct FlashMlaV2Tiling {
  bool evict_first = false;
  int prefetch = 0;
  int token_bytes = 0;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("evict_first", self.evict_first, "L2 drops loaded tokens first: for few row tiles per request");
    field("prefetch", self.prefetch,
          "token blocks that L2 is asked for while the kernel before this one ends; dense caches only");
    field("token_bytes", self.token_bytes, "of a cache in FP8, 656 or 576, which MlaDecode says; else 0");
  }
};

}  // namespace hypermla::cute
