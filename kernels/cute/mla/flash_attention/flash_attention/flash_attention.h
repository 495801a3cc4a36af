// Attention over decompressed keys and values, hand-scheduled for Hopper (sm_90a): the problem and the tiling. Read by
// the host and, as template arguments of the kernel, by the device compiler.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla::cute {

inline constexpr unsigned kFlashAttentionSharedBytes = 213632;  // of a thread block, see the kernel's Shared

// o = softmax((q k^T + qpe kpe^T) * scale) v for every batch element and head; kpe is shared by the heads. With prefixes, keys
// and values are those of a prefix that several requests share, and the queries of these requests are rows of one matrix.
struct FlashAttentionProblem {
  int b = 32;
  int s = 128;
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
    field("t", self.t, "context length in tokens; of ragged requests or prefixes the longest");
    field("h", self.h, "query heads");
    field("d", self.d, "head dimension");
    field("p", self.p, "RoPE dimension");
    field("dtype", self.dtype, "element type of all tensors but the log-sum-exp");
    field("causal", self.causal, "query i sees the tokens up to t - s + i only");
    field("ragged", self.ragged, "requests (or prefixes) have lengths of their own, up to t: an input, read by the kernel");
    field("prefixes", self.prefixes, "sets of keys and values that requests share; `prefix` [B] names each request's. 0: one for each");
    field("after", self.after, "tokens of each request behind its prefix: a causal mask counts them; ragged: at most, see after_lengths");
    field("parts", self.parts, "outputs [parts,B,H,S,D] over equal parts of a prefix, to be merged: for few tiles");
  }
};

struct FlashAttentionTiling {
  int section = 32;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("section", self.section, "MiB of keys and values whose heads are walked together, to stay in L2");
  }
};

}  // namespace hypermla::cute
