// Attention over a latent cache in FP8 with products of e4m3, hand-scheduled for Hopper (sm_90a): the tiling.
// Read by the host and, as a template argument of the kernel, by the device compiler.
#pragma once

#include "mla/latent/latent.h"

namespace hypermla::cute {

inline constexpr unsigned kFlashMlaV2SharedBytes = 226848;  // of a thread block, see the kernel's Shared
inline constexpr unsigned kFlashMlaV2Threads = 512;

struct FlashMlaV2Tiling {
  int rows = 64;
  bool evict_first = false;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("rows", self.rows, "rows (heads x queries) of a tile: 16, 32, 48, 64");
    field("evict_first", self.evict_first, "L2 drops loaded tokens first: for few row tiles per request");
  }
};

}  // namespace hypermla::cute
