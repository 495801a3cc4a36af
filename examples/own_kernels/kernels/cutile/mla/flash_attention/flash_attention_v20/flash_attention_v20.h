// Attention over decompressed keys and values: the tiling. Read by the host and, as a template argument of the
// kernel, by the device compilers.
#pragma once

#include "mla/decompressed/decompressed.h"

namespace hypermla {

struct FlashAttentionV20Tiling {
  int Bm = 64;
  int Bn = 64;
  int num_warps = 4;
  int occupancy = 2;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "queries per block");
    field("Bn", self.Bn, "tokens per step");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks that should fit on one multiprocessor");
  }
};

}  // namespace hypermla
