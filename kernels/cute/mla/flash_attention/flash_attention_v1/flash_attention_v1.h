// Attention over decompressed keys and values for few queries, hand-scheduled for Hopper (sm_90a): the tiling. Read by
// the host and, as a template argument of the kernel, by the device compiler.
#pragma once

#include "hypermla/tensor_map.h"
#include "mla/decompressed/decompressed.h"

namespace hypermla::cute {

// Dynamic shared memory of a thread block for tiles of 16, 32 or 64 rows, see the kernel's Shared.
constexpr unsigned flash_attention_v1_shared_bytes(int rows) {
  return rows == 16 ? 230240 : rows == 32 ? 230752 : 231792;
}

struct FlashAttentionV1Tiling {
  int rows = 16;
  int blocks = 0;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("rows", self.rows, "queries of a tile: 16, 32, 64");
    field("blocks", self.blocks, "thread blocks, each with a multiprocessor of its own; 0: one for each there is");
  }
};

struct FlashAttentionV1Arguments {
  // Queries [B * H, S, 128] and [B * H, S, 64], boxes of `rows` rows and 2 groups / 1 group of 64 columns.
  TensorMap q_map = {}, qpe_map = {};
  // Keys and values [B * H, T, 128] and RoPE keys [B, T, 64], boxes of 64 tokens and 2 groups / 1 group.
  TensorMap k_map = {}, kpe_map = {}, v_map = {};
  TensorMap o_map = {};          // outputs, boxes of `rows` rows and 2 groups (for 16 and 32 rows)
  void* o = nullptr;             // [B, H, S, 128], the same, in the type of the queries
  float* lse = nullptr;          // [B, H, S], natural logarithm
  const int* lengths = nullptr;  // [B] tokens, 0 <= length <= t; null: t each
  int* counter = nullptr;        // of drawn items: 0 before the first launch, and every launch leaves it 0
  float scale_log2 = 0;          // of the scores, times log2(e); positive
  int b = 0, h = 0, s = 0, t = 0;
};

}  // namespace hypermla::cute
