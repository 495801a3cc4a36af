// The hybrid on Hopper in one launch, both kinds of work from one queue: the problem and the tiling.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla::cute {

inline constexpr unsigned kMlaVar6PlusV6SharedBytes = 231040;  // of a thread block, see the kernel's Control

// Attention over t tokens of which n are decompressed and the others latent, see plan/hybrid.h.
struct MlaVar6PlusV6Problem {
  int b = 32;
  int s = 32;
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
    field("n", self.n, "decompressed tokens of each request; -1: what the cost model chooses");
    field("h", self.h, "query heads");
    field("d", self.d, "head dimension");
    field("p", self.p, "RoPE dimension");
    field("k", self.k, "latent dimension");
    field("dtype", self.dtype, "element type of all tensors but the log-sum-exp");
    field("causal", self.causal, "query i sees the tokens up to t - s + i only");
    field("ragged", self.ragged,
          "lengths [B] latent tokens and new_lengths decompressed tokens: inputs, read by the kernel");
    field("prefixes", self.prefixes,
          "0: each request has its own decompressed tokens, the newest; v0 takes those that requests share");
    field("tokens_first", self.tokens_first, "output [b,s,h,d] instead of [b,h,s,d]");
  }
};

struct MlaVar6PlusV6Tiling {
  int rows = 32;
  int streams = 56;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("rows", self.rows, "queries of a decompressed tile: 16, 32, 64");
    field("streams", self.streams,
          "thread blocks that begin with decompressed items; the others begin with latent ones");
  }
};

}  // namespace hypermla::cute
