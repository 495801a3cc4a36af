// Attention in the latent space (absorbed queries, latent keys that are also the values): the problem of every version,
// in every language. Read by the host and, as a template argument of the kernels, by the device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

// o = softmax((qc z^T + qpe kpe^T) * scale) z for every batch element and head; z and kpe are shared by the heads.
struct LatentProblem {
  int b = 64;
  int s = 1;
  int t = 4096;
  int h = 128;
  int d = 128;
  int p = 64;
  int k = 512;
  DType dtype = DType::bfloat16;
  bool causal = false;
  bool ragged = false;
  int page = 0;
  int pages = 0;
  bool fused = false;
  float scale = 0;
  bool lse_base2 = false;
  int split = 0;
  int after = 0;
  bool tokens_first = false;
  int fp8 = 0;
  bool shards = false;

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
    field("ragged", self.ragged, "each request has its own length, up to t, in the device tensor lengths [B]");
    field("page", self.page, "tokens of a cache page: 1, 16, 32, 64, 128, with a block table; 0: a dense cache");
    field("pages", self.pages, "pages of the pool; 0: as many as b requests of t tokens need");
    field("fused", self.fused, "queries and cache are one tensor each, latent and RoPE columns side by side");
    field("scale", self.scale, "factor of the scores; 0: 1 / sqrt(d + p)");
    field("lse_base2", self.lse_base2, "log-sum-exp in base 2 instead of natural");
    field("split", self.split,
          "tokens after which each request is cut, whatever its batch: bits do not depend on batch mates; 0: free");
    field("after", self.after,
          "tokens behind these that a causal mask counts: query i sees t + after - s + i + 1 of them; ragged: at most "
          "(after_lengths)");
    field("tokens_first", self.tokens_first, "queries, output and log-sum-exp are [b,s,h,..] instead of [b,h,s,..]");
    field(
        "fp8", self.fp8,
        "bytes of a token in FP8: 656 (512 e4m3, 4 fp32 scales, 64 bf16 of RoPE) or 576 (e4m3, one scale for all); 0: "
        "elements of dtype; MlaDecode only");
    field("shards", self.shards, "the cache holds some of the tokens of every request; MlaDecode only");
  }
};

}  // namespace hypermla
