// Decoding as engines call it, in CUDA Tile C++: what the kernels know when they are compiled. Read by the host and, as
// template arguments, by the device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

inline constexpr int kDecodeLatent = 512, kDecodeRope = 64;

struct PagedDecodeProblem {
  DType dtype = DType::bfloat16;
  bool causal = true;
  int page = 64;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("dtype", self.dtype, "type of queries, cache and output");
    field("causal", self.causal, "query i of n sees the first tokens - n + i + 1 tokens");
    field("page", self.page, "tokens of a page, a power of two; 1: the table lists tokens, some of which may be none");
  }
};

struct PagedDecodeTiling {
  int Bh = 64;
  int Bq = 1;
  int Bn = 64;
  int Bv = 512;
  int Bk = 128;
  int num_warps = 8;
  int occupancy = 1;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bh", self.Bh, "heads per block");
    field("Bq", self.Bq, "queries per block; its rows are Bq * Bh");
    field("Bn", self.Bn, "tokens per step");
    field("Bv", self.Bv, "value columns per block; the scores are made again for every 512 / Bv of them");
    field("Bk", self.Bk, "latent columns of one load for the scores");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks that should fit on one multiprocessor");
  }
};

}  // namespace hypermla
