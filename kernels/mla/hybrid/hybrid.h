// The hybrid of latent and decompressed attention: the problem of every version, in every language. Read by the host
// and, as a template argument of the kernels, by the device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

// n tokens of every request are attended to decompressed, the other t - n in the latent space, in one softmax; the
// latent part goes through the value projection of its head. hybrid_plan.h says what the tensors are.
struct HybridProblem {
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
    field("t", self.t, "context length in tokens, the decompressed ones included; of ragged requests the longest");
    field("n", self.n,
          "decompressed tokens of each request; -1: what the model chooses (docs/choice.md), not with prefixes");
    field("h", self.h, "query heads");
    field("d", self.d, "head dimension");
    field("p", self.p, "RoPE dimension");
    field("k", self.k, "latent dimension");
    field("dtype", self.dtype, "element type of all tensors but the log-sum-exp");
    field("causal", self.causal, "query i sees the tokens up to t - s + i only");
    field("ragged", self.ragged,
          "lengths [B] latent tokens and new_lengths decompressed tokens: inputs, read by the kernels");
    field("prefixes", self.prefixes,
          "sets of decompressed tokens that requests share: their first n; 0: each its own, the newest");
    field("tokens_first", self.tokens_first, "output [b,s,h,d] instead of [b,h,s,d]");
  }
};

}  // namespace hypermla
