// The hybrid of latent and decompressed attention: the tiling of the first stage. Read by the host and, as a
// template argument of the kernel, by the device compilers.
#pragma once

#include "mla/hybrid/hybrid.h"

namespace hypermla {

struct MlaVar6PlusTiling {
  int Bm = 16;
  int Bn = 64;
  int Bv = 512;
  int Bk = 128;
  int blocks = 132;
  int num_warps = 8;
  int occupancy = 1;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "rows per unit of work: queries of one head");
    field("Bn", self.Bn, "tokens per step");
    field("Bv", self.Bv, "latent value columns per unit; the scores are made again for every k / Bv of them");
    field("Bk", self.Bk, "latent columns of one load for the scores");
    field("blocks", self.blocks, "blocks of the launch, half of them for each path");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks that should fit on one multiprocessor");
  }
};

}  // namespace hypermla
