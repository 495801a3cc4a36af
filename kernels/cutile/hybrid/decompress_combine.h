// The last stage of the hybrid: the problem and the tiling. Read by the host and, as template arguments of the kernel, by the
// device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

// o = (sum of weighted latent parts) w + sum of weighted decompressed parts, weights by log-sum-exp.
struct DecompressCombineProblem {
  int b = 64;
  int s = 1;
  int h = 128;
  int d = 128;
  int k = 512;
  DType dtype = DType::bfloat16;
  int latent_parts = 1;
  int decompressed_parts = 1;
  bool tokens_first = false;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("b", self.b, "batch size");
    field("s", self.s, "queries per head");
    field("h", self.h, "query heads");
    field("d", self.d, "head dimension");
    field("k", self.k, "latent dimension");
    field("dtype", self.dtype, "element type of all tensors but the log-sum-exps");
    field("latent_parts", self.latent_parts, "partial outputs in the latent space");
    field("decompressed_parts", self.decompressed_parts, "partial outputs of the head dimension");
    field("tokens_first", self.tokens_first, "the output is [b,s,h,d] instead of [b,h,s,d]");
  }
};

struct DecompressCombineTiling {
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
