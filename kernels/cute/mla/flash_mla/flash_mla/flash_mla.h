// Attention in the latent space, hand-scheduled for Hopper (sm_90a): the tiling.
// Read by the host and, as a template argument of the kernel, by the device compiler.
#pragma once

#include "mla/latent/latent.h"

namespace hypermla::cute {

// Of a thread block, see the kernel's Shared.
constexpr unsigned flash_mla_shared_bytes(bool spare) { return spare ? 232272 : 224080; }
inline constexpr unsigned kFlashMlaThreads = 384;

struct FlashMlaTiling {
  bool evict_first = false;
  int prefetch = 0;
  bool spare = false;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("evict_first", self.evict_first, "L2 drops loaded tokens first: for few row tiles per request");
    field("prefetch", self.prefetch,
          "token blocks that L2 is asked for while the kernel before this one ends; not of pages of 1 token");
    field("spare", self.spare, "one place more for tokens: for two row tiles per request; not of pages of 1 token");
  }
};

}  // namespace hypermla::cute
