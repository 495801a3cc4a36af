// The decompressed kernel of the hybrid: its tiling. Read by the host and, as a template argument of the kernel,
// by the device compilers.
#pragma once

#include "mla/hybrid/hybrid.h"

namespace hypermla {

struct MlaVar6PlusV4DecompressedTiling {
  int Bb = 1;
  int Bs = 16;
  int Bn = 128;
  int parts = 1;
  int blocks = 64;
  int num_warps = 4;
  int occupancy = 2;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bb", self.Bb, "requests per unit");
    field("Bs", self.Bs, "queries of a request per unit");
    field("Bn", self.Bn, "tokens per step");
    field("parts", self.parts, "cuts along the tokens of a request");
    field("blocks", self.blocks, "resident blocks");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks on one multiprocessor");
  }
};

}  // namespace hypermla
