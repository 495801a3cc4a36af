// Decompression of latent attention outputs to the head dimension: the problem and the tiling. Read by the host and, as
// template arguments of the kernel, by the device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

// o = o_latent w, with one k x d matrix w per head.
struct OutputDecompressionProblem {
  int b = 64;
  int s = 1;
  int h = 128;
  int d = 128;
  int k = 512;
  DType dtype = DType::bfloat16;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("b", self.b, "batch size");
    field("s", self.s, "queries per head");
    field("h", self.h, "query heads");
    field("d", self.d, "head dimension");
    field("k", self.k, "latent dimension");
    field("dtype", self.dtype, "element type of all tensors");
  }
};

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
