// The last step of an attention in parts, on Hopper: the value projection of the latent parts and the merge of all
// parts. The tiling. Read by the host and, as a template argument of the kernel, by the device compiler.
#pragma once

#include "hypermla/tensor_map.h"
#include "mla/combine/combine.h"

namespace hypermla::cute {

// Of a thread block.
inline constexpr unsigned kDecompressCombineThreads = 320;
inline constexpr unsigned kDecompressCombineSharedBytes = 229632;  // see the kernel's Shared
inline constexpr int kDecompressCombineRows = 64;                  // of a tile

struct DecompressCombineTiling {
  int blocks = 1;
  bool keep = false;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("blocks", self.blocks, "thread blocks per head, which share its rows");
    field("keep", self.keep, "leave the rows that were read in L2 as long as other data");
  }
};

// How the rows of a head fall into tiles, and where they lie.
struct CombineRows {
  int b, h, s;
  int Bs, Bb;       // of a tile
  int query_tiles;  // per Bb requests
  int tiles;        // of a head
  int latent_parts, decompressed_parts;
  int head_groups;  // from a head's first 64 columns in o to those of the next, in groups of 64
};

// M latent parts and R decompressed ones, as in mla/combine/combine_plan.h; log-sum-exps natural, fp32.
struct DecompressCombineArguments {
  // o_latent [M, B, H, S, 512] and o_new [R, B, H, S, 128] as (64 columns, query, 64 columns of a query of a head:
  // (head * S) * width / 64 + group, part * B + request), boxes of Bs queries of Bb requests.
  TensorMap latent_map = {}, decompressed_map = {};
  TensorMap w_map = {};  // [H, 512, 128], boxes of 64 rows and both groups
  TensorMap o_map = {};  // [B, H, S, 128] or [B, S, H, 128] as (64 columns, query, group, request), boxes likewise
  const float* lse_latent = nullptr;        // [M, B, H, S]
  const float* lse_decompressed = nullptr;  // [R, B, H, S]
  float* lse = nullptr;                     // [B, H, S]
  CombineRows rows = {};
  int blocks = 0;  // thread blocks of a head
};

}  // namespace hypermla::cute
