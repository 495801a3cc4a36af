// Attention in the latent space, hand-scheduled for Hopper (sm_90a): the problem, the tiling, and the work list.
// Read by the host and, as template arguments of the kernel, by the device compiler.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla::cute {

// o = softmax((qc z^T + qpe kpe^T) * scale) z for every batch element and head; z and kpe are shared by the heads.
struct FlashMlaProblem {
  int b = 32;
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

// No choices: one shape, 64 rows x 64 tokens.
struct FlashMlaTiling {
  template <class Self, class Visitor>
  static constexpr void fields(Self&, Visitor&&) {}
};

}  // namespace hypermla::cute
