// Attention over decompressed keys and values, hand-scheduled for Hopper (sm_90a): the tiling. Read by the host and, as
// a template argument of the kernel, by the device compiler.
#pragma once

#include "mla/decompressed/decompressed.h"

namespace hypermla::cute {

inline constexpr unsigned kFlashAttentionSharedBytes = 213632;  // of a thread block, see the kernel's Shared

struct FlashAttentionTiling {
  int section = 32;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("section", self.section, "MiB of keys and values whose heads are walked together, to stay in L2");
  }
};

}  // namespace hypermla::cute
