// Decompression of the latents of a prefix to keys and values: the problem and the tiling. Read by the host and, as
// template arguments of the kernel, by the device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

// k = z wk and v = z wv, with two k x d matrices per head.
struct PrefixDecompressionProblem {
  int b = 1;
  int t = 4096;
  int h = 128;
  int d = 128;
  int k = 512;
  DType dtype = DType::bfloat16;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("b", self.b, "prefixes");
    field("t", self.t, "tokens of a prefix");
    field("h", self.h, "heads");
    field("d", self.d, "head dimension");
    field("k", self.k, "latent dimension");
    field("dtype", self.dtype, "element type of all tensors");
  }
};

struct PrefixDecompressionTiling {
  int Bm = 128;
  int Bd = 128;
  int Bk = 64;
  int num_warps = 8;
  int occupancy = 1;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "tokens per block");
    field("Bd", self.Bd, "columns per block, of the keys and of the values");
    field("Bk", self.Bk, "latent columns per step");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks that should fit on one multiprocessor");
  }
};

}  // namespace hypermla
