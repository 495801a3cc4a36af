// Attention over decompressed keys and values: the problem and the tiling. Read by the host and, as template arguments
// of the kernel, by the device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

// o = softmax((q k^T + qpe kpe^T) * scale) v for every batch element and head.
struct FlashAttentionProblem {
  int b = 64;
  int s = 1;
  int t = 4096;
  int h = 128;
  int d = 128;
  int p = 64;
  DType dtype = DType::bfloat16;
  bool causal = false;

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
  }
};

struct FlashAttentionTiling {
  int Bm = 64;
  int Bn = 64;
  int num_warps = 4;
  int occupancy = 2;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "queries per block");
    field("Bn", self.Bn, "tokens per step");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks that should fit on one multiprocessor");
  }
};

}  // namespace hypermla
