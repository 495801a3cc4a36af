// The decompressed kernel of the hybrid: what it knows at compile time, and its tiling. Read by the host and, as template
// arguments of the kernel, by the device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

struct MlaVar6PlusV4DecompressedProblem {
  int d = 128;
  int p = 64;
  DType dtype = DType::bfloat16;
  bool causal = false;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("d", self.d, "head dimension");
    field("p", self.p, "RoPE dimension");
    field("dtype", self.dtype, "element type of all tensors but the log-sum-exp");
    field("causal", self.causal, "query i sees the tokens up to t - s + i only");
  }
};

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
