// Attention in the latent space for few rows, hand-scheduled for Hopper (sm_90a): the tiling.
// Read by the host and, as a template argument of the kernel, by the device compiler.
#pragma once

#include "mla/latent/latent.h"

namespace hypermla::cute {

// Dynamic shared memory of a thread block for tiles of 16 or 32 rows, see the kernel's Shared.
constexpr unsigned flash_mla_v1_shared_bytes(int rows) { return rows == 16 ? 223040 : 231232; }

struct FlashMlaV1Tiling {
  int rows = 16;
  int cluster = 1;
  bool evict_first = true;
  int prefetch = 0;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("rows", self.rows, "rows (heads x queries) of a tile: 16, 32");
    field("cluster", self.cluster, "thread blocks placed side by side, whose row tiles read the same tokens: 1, 2");
    field("evict_first", self.evict_first, "L2 drops loaded tokens first");
    field("prefetch", self.prefetch,
          "token blocks that L2 is asked for while the kernel before this one ends; not of pages of 1 token");
  }
};

}  // namespace hypermla::cute
