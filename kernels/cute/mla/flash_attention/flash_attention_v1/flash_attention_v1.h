// Attention over decompressed keys and values for few queries, hand-scheduled for Hopper (sm_90a): the tiling. Read by
// the host and, as a template argument of the kernel, by the device compiler.
#pragma once

#include "mla/decompressed/decompressed.h"

namespace hypermla::cute {

// Dynamic shared memory of a thread block for tiles of 16, 32 or 64 rows, see the kernel's Shared.
constexpr unsigned flash_attention_v1_shared_bytes(int rows) {
  return rows == 16 ? 230240 : rows == 32 ? 230752 : 231792;
}

struct FlashAttentionV1Tiling {
  int rows = 16;
  int blocks = 0;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("rows", self.rows, "queries of a tile: 16, 32, 64");
    field("blocks", self.blocks, "thread blocks, each with a multiprocessor of its own; 0: one for each there is");
  }
};

}  // namespace hypermla::cute
