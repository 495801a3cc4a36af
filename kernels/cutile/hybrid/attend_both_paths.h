// Both paths of the hybrid in one kernel: the tiling. Read by the host and, as a template argument of the kernel, by
// the device compilers.
#pragma once

#include "mla/hybrid/hybrid.h"

namespace hypermla {

struct AttendBothPathsTiling {
  int Bm = 64;
  int Bn = 64;
  int Bv = 512;
  int Bk = 128;
  int new_Bb = 1;
  int new_Bs = 16;
  int new_Bn = 64;
  int latent_blocks = 66;
  int new_blocks = 66;
  int latent_parts = 1;
  int new_parts = 1;
  int num_warps = 8;
  int occupancy = 1;

  template <class Self, class Visitor>
  static constexpr void fields(Self &self, Visitor &&field) {
    field("Bm", self.Bm,
          "rows per unit of latent work, queries of one head or (from v2 on) of all; before v3 of both paths");
    field("Bn", self.Bn, "latent tokens per step; before v3 of both paths");
    field("Bv", self.Bv,
          "latent value columns per unit; the scores are made again for every "
          "k / Bv of them");
    field("Bk", self.Bk, "latent columns of one load for the scores");
    field("new_Bb", self.new_Bb,
          "requests per unit of decompressed work; above 1 only with shared "
          "prefixes");
    field("new_Bs", self.new_Bs, "queries of a request per unit of decompressed work");
    field("new_Bn", self.new_Bn, "decompressed tokens per step");
    field("latent_blocks", self.latent_blocks, "blocks for the latent path");
    field("new_blocks", self.new_blocks, "blocks for the decompressed path");
    field("latent_parts", self.latent_parts, "cuts along the latent tokens of a request");
    field("new_parts", self.new_parts, "cuts along the decompressed tokens of a store");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks that should fit on one multiprocessor");
  }
};

}  // namespace hypermla
