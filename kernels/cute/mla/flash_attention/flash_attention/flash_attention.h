// Attention over decompressed keys and values, hand-scheduled for Hopper (sm_90a): the problem and the tiling. Read by
// the host and, as template arguments of the kernel, by the device compiler.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla::cute {

inline constexpr unsigned kFlashAttentionSharedBytes = 213120;  // of a thread block, see the kernel's SharedPlan

// o = softmax((q k^T + qpe kpe^T) * scale) v for every batch element and head; kpe is shared by the heads.
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
    field("ragged", self.ragged, "requests have lengths of their own, up to t: an input, read by the kernel");
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
