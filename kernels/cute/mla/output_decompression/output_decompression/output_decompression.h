// Decompression of latent attention outputs to the head dimension, with CUTLASS on Hopper: the tiling.
// Read by the host and, as a template argument of the kernel, by the device compiler.
#pragma once

#include "hypermla/tensor_map.h"
#include "mla/output_decompression/output_decompression.h"

namespace hypermla::cute {

struct OutputDecompressionTiling {
  int Bs = 64;
  int blocks = 1;
  int stages = 8;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bs", self.Bs, "queries of a batch element per tile of 64 rows; the rest are batch elements");
    field("blocks", self.blocks, "thread blocks per head, which share its tiles");
    field("stages", self.stages, "boxes of 64 rows x 64 latent columns in flight");
  }
};

// Boxes of the maps, innermost axis first.
struct OutputDecompressionArguments {
  // [B,H,S,K] as (column, query, batch element, 64 columns, head): (64 columns, Bs, Bb).
  TensorMap o_latent_map = {};
  TensorMap w_map = {};  // [H,K,D] as (column, row, 64 columns, head): (64 columns, 64 rows, D / 64)
  TensorMap o_map = {};  // [B,H,S,D] like o_latent: (64 columns, Bs, Bb, D / 64)
  int tiles = 0;         // of a head
  int query_tiles = 0;   // per Bb batch elements
  int Bs = 0;
};

inline constexpr int kOutputDecompressionRows = 64;  // of a tile

// Dynamic shared memory: the matrix of the head, the ring of row boxes, the outputs of a tile, 1 KB with the barriers,
// and 1 KB to align it.
constexpr unsigned output_decompression_shared_bytes(int k, int d, int stages) {
  return 2u * unsigned(k * d + (stages * 64 + d) * kOutputDecompressionRows) + 2 * 1024;
}

}  // namespace hypermla::cute
