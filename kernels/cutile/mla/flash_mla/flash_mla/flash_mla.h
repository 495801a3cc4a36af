// Attention in the latent space (absorbed queries, latent keys that are also the values): the tiling.
// Read by the host and, as a template argument of the kernel, by the device compilers.
#pragma once

#include "mla/latent/latent.h"

namespace hypermla {

struct FlashMlaTiling {
  int Bm = 64;
  int Bn = 64;
  int Bv = 512;
  int Bk = 128;
  int num_warps = 8;
  int occupancy = 1;
  int Bh = 0;
  int num_ctas = 1;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "rows per block; a row is one query of one head");
    field("Bn", self.Bn, "tokens per step");
    field("Bv", self.Bv, "value columns per block; the scores are made again for every k / Bv of them");
    field("Bk", self.Bk, "latent columns of one load for the scores");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks that should fit on one multiprocessor");
    field("Bh", self.Bh, "heads whose queries are rows of one matrix, a divisor of h; 0: all");
    field("num_ctas", self.num_ctas, "thread blocks of a cluster that share the work of one block, from Hopper on");
  }
};

}  // namespace hypermla
