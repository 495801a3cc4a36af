// The hybrid of latent and decompressed attention: the problem, and the tiling of the first stage. Read by the host and, as
// template arguments of the kernel, by the device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

// n tokens of every request are attended to decompressed, the other t - n in the latent space, in one softmax; the latent part
// goes through the value projection of its head. src/hypermla/plan/hybrid.h says what the tensors are.
struct MlaVar6PlusV1Problem {
  int b = 64;
  int s = 1;
  int t = 4096;
  int n = -1;
  int h = 128;
  int d = 128;
  int p = 64;
  int k = 512;
  DType dtype = DType::bfloat16;
  bool causal = false;
  bool ragged = false;
  int prefixes = 0;
  bool tokens_first = false;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("b", self.b, "batch size");
    field("s", self.s, "queries per head");
    field("t", self.t, "context length in tokens");
    field("n", self.n, "decompressed tokens of the context; -1: as many as the cost model finds fastest");
    field("h", self.h, "query heads");
    field("d", self.d, "head dimension");
    field("p", self.p, "RoPE dimension");
    field("k", self.k, "latent dimension");
    field("dtype", self.dtype, "element type of all tensors but the log-sum-exp");
    field("causal", self.causal, "query i sees the tokens up to t - s + i only");
    field("ragged", self.ragged, "requests and stores have lengths of their own");
    field("prefixes", self.prefixes, "sets of n decompressed tokens that requests share; 0: each request has its own");
    field("tokens_first", self.tokens_first, "the output is [b,s,h,d] instead of [b,h,s,d]");
  }
};

struct MlaVar6PlusV1Tiling {
  int Bm = 16;
  int Bn = 64;
  int Bv = 512;
  int Bk = 128;
  int latent_blocks = 66;
  int new_blocks = 66;
  int latent_parts = 1;
  int new_parts = 1;
  int num_warps = 8;
  int occupancy = 1;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "rows per unit of work: queries of one head");
    field("Bn", self.Bn, "tokens per step");
    field("Bv", self.Bv, "latent value columns per unit; the scores are made again for every k / Bv of them");
    field("Bk", self.Bk, "latent columns of one load for the scores");
    field("latent_blocks", self.latent_blocks, "blocks for the latent path");
    field("new_blocks", self.new_blocks, "blocks for the decompressed path");
    field("latent_parts", self.latent_parts, "cuts along the latent tokens of a request");
    field("new_parts", self.new_parts, "cuts along the decompressed tokens of a request");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks that should fit on one multiprocessor");
  }
};

}  // namespace hypermla
