// Attention over decompressed keys and values for few queries, hand-scheduled for Hopper (sm_90a): the problem and the
// tiling. Read by the host and, as template arguments of the kernel, by the device compiler.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla::cute {

// Dynamic shared memory of a thread block for tiles of 16, 32 or 64 rows, see the kernel's Shared.
constexpr unsigned flash_attention_v1_shared_bytes(int rows) {
  return rows == 16 ? 230240 : rows == 32 ? 230752 : 231792;
}

// o = softmax((q k^T + qpe kpe^T) * scale) v for every batch element and head; kpe is shared by the heads.
struct FlashAttentionV1Problem {
  int b = 32;
  int s = 16;
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

struct FlashAttentionV1Tiling {
  int rows = 16;
  int blocks = 0;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("rows", self.rows, "queries of a tile: 16, 32, 64");
    field("blocks", self.blocks, "thread blocks, each with a multiprocessor of its own; 0: one for each there is");
  }
};

}  // namespace hypermla::cute
