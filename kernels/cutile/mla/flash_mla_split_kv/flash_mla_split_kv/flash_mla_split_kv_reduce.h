// The tiling of the second stage of FlashMLA with split tokens. Read by the host and by the device compilers.
#pragma once

#include "mla/latent/latent.h"

namespace hypermla {

struct FlashMlaSplitKvReduceTiling {
  int Bm = 4;
  int Bv = 512;
  int num_warps = 4;
  int occupancy = 4;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "rows per block; a row is one query of one head of one batch element");
    field("Bv", self.Bv, "output columns per block");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks that should fit on one multiprocessor");
  }
};

}  // namespace hypermla
