// Attention over decompressed keys and values: the problem of every version, in every language. Read by the host and,
// as a template argument of the kernels, by the device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

// o = softmax((q k^T + qpe kpe^T) * scale) v for every batch element and head; kpe is shared by the heads. With
// prefixes, keys and values are those of a prefix that several requests share.
struct DecompressedProblem {
  int b = 64;
  int s = 1;
  int t = 4096;
  int h = 128;
  int d = 128;
  int p = 64;
  DType dtype = DType::bfloat16;
  bool causal = false;
  bool ragged = false;
  int prefixes = 0;
  int after = 0;
  int parts = 1;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("b", self.b, "batch size");
    field("s", self.s, "queries per head");
    field("t", self.t, "context length in tokens");
    field("h", self.h, "query heads");
    field("d", self.d, "head dimension");
    field("p", self.p, "RoPE dimension");
    field("dtype", self.dtype, "element type of all tensors but the log-sum-exp");
    field("causal", self.causal, "query i sees the tokens up to t - s + i only");
    field("ragged", self.ragged,
          "requests (or prefixes) have lengths of their own, up to t: an input, read by the kernel");
    field("prefixes", self.prefixes,
          "sets of keys and values that requests share; `prefix` [B] names each request's. 0: one for each");
    field("after", self.after,
          "tokens of each request behind its prefix: a causal mask counts them; ragged: at most, see after_lengths");
    field("parts", self.parts, "outputs [parts,B,H,S,D] over equal parts of a prefix, to be merged: for few tiles");
  }
};

inline constexpr int kPartTokens = 128;  // parts of a prefix end at multiples of it

}  // namespace hypermla
