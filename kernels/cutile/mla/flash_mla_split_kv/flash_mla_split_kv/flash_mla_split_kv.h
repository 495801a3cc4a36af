// Attention in the latent space with the tokens split over several blocks: the problem, and the tiling of the first
// stage. Read by the host and, as template arguments of the kernels, by the device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

// o = softmax((qc z^T + qpe kpe^T) * scale) z for every batch element and head; z and kpe are shared by the heads.
struct FlashMlaSplitKvProblem {
  int b = 64;
  int s = 1;
  int t = 4096;
  int h = 128;
  int d = 128;
  int p = 64;
  int k = 512;
  DType dtype = DType::bfloat16;
  bool causal = false;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("b", self.b, "batch size");
    field("s", self.s, "queries per head");
    field("t", self.t, "context length in tokens");
    field("h", self.h, "query heads");
    field("d", self.d, "head dimension before absorption; it sets the scale only");
    field("p", self.p, "RoPE dimension");
    field("k", self.k, "latent dimension");
    field("dtype", self.dtype, "element type of all tensors but the log-sum-exp");
    field("causal", self.causal, "query i sees the tokens up to t - s + i only");
  }
};

struct FlashMlaSplitKvTiling {
  int Bm = 64;
  int Bn = 64;
  int Bv = 512;
  int Bk = 128;
  int splits = 2;
  int num_warps = 8;
  int occupancy = 1;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "rows per block; a row is one query of one head");
    field("Bn", self.Bn, "tokens per step");
    field("Bv", self.Bv, "value columns per block; the scores are made again for every k / Bv of them");
    field("Bk", self.Bk, "latent columns of one load for the scores");
    field("splits", self.splits, "parts of the context, each walked over by its own blocks");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks that should fit on one multiprocessor");
  }
};

}  // namespace hypermla
