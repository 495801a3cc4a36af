// Attention over decompressed keys and values, hand-scheduled for Hopper (sm_90a): the tiling. Read by the host and, as
// a template argument of the kernel, by the device compiler.
#pragma once

#include "hypermla/tensor_map.h"
#include "mla/decompressed/decompressed.h"

namespace hypermla::cute {

struct FlashAttentionTiling {
  int section = 32;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("section", self.section, "MiB of keys and values whose heads are walked together, to stay in L2");
  }
};

struct ChunkCount;

struct FlashAttentionArguments {
  // Queries [B * H, S, 128] and [B * H, S, 64], boxes of 128 rows and 2 groups / 1 group of 64 columns; with prefixes
  // boxes of one group and min(S, 128) rows.
  TensorMap q_map = {}, qpe_map = {};
  // Keys and values [B * H, T, 128] and RoPE keys [B, T, 64], boxes of 128 rows. With prefixes, B is their number.
  TensorMap k_map = {}, kpe_map = {}, v_map = {};
  void* o = nullptr;             // [B, H, S, 128], in the type of the queries; with prefixes, one of each part
  float* lse = nullptr;          // [B, H, S], natural logarithm, of each part
  const int* lengths = nullptr;  // [B] tokens, 0 <= length <= t; null: t each
  int* counter = nullptr;        // of drawn tiles: 0 before the first launch, and every launch leaves it 0
  // With prefixes, as plan_prefixes makes them; order null: requests as they come.
  const ChunkCount* chunk_list = nullptr;
  const int* order = nullptr;
  const int* after_lengths = nullptr;  // [B] tokens that follow the prefix; null: `after` each
  float scale_log2 = 0;                // of the scores, times log2(e); positive
  int b = 0, h = 0, s = 0, t = 0;
  int heads_per_section = 0;  // see HeadTiles (flash_attention.cuh)
  int after = 0;
};

}  // namespace hypermla::cute
