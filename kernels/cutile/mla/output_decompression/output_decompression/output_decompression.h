// Decompression of latent attention outputs to the head dimension: the tiling. Read by the host and, as a
// template argument of the kernel, by the device compilers.
#pragma once

#include "mla/output_decompression/output_decompression.h"

namespace hypermla {

struct OutputDecompressionTiling {
  int Bb = 4;
  int Bs = 16;
  int Bd = 128;
  int Bk = 32;
  int num_warps = 4;
  int occupancy = 2;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bb", self.Bb, "batch elements per block");
    field("Bs", self.Bs, "queries of a batch element per block");
    field("Bd", self.Bd, "output columns per block");
    field("Bk", self.Bk, "latent columns per step");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks that should fit on one multiprocessor");
  }
};

}  // namespace hypermla
