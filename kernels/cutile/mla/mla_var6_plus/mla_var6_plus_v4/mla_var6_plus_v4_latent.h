// The latent kernel of the hybrid: its tiling. Read by the host and, as a template argument
// of the kernel, by the device compilers.
#pragma once

#include "mla/hybrid/hybrid.h"

namespace hypermla {

struct MlaVar6PlusV4LatentTiling {
  int Bm = 64;
  int Bn = 64;
  int Bv = 512;
  int Bk = 128;
  int parts = 1;
  int blocks = 100;
  int num_warps = 8;
  int occupancy = 1;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "rows per unit: queries of all heads");
    field("Bn", self.Bn, "tokens per step");
    field("Bv", self.Bv, "value columns per unit");
    field("Bk", self.Bk, "columns of one load for the scores");
    field("parts", self.parts, "cuts along the tokens of a request");
    field("blocks", self.blocks, "resident blocks");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks on one multiprocessor");
  }
};

}  // namespace hypermla
