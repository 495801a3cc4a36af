// The latent kernel of the hybrid: what it knows at compile time, and its tiling. Read by the host and, as template arguments
// of the kernel, by the device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

struct MlaVar6PlusV4LatentProblem {
  int p = 64;
  int k = 512;
  DType dtype = DType::bfloat16;
  bool causal = false;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("p", self.p, "RoPE dimension");
    field("k", self.k, "latent dimension");
    field("dtype", self.dtype, "element type of all tensors but the log-sum-exp");
    field("causal", self.causal, "query i sees the tokens up to t - s + i only");
  }
};

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
