// Decompression of latent attention outputs to the head dimension, with CUTLASS on Hopper: the problem and the tiling.
// Read by the host and, as template arguments of the kernel, by the device compiler.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla::cute {

// o = o_latent w, with one k x d matrix w per head.
struct OutputDecompressionProblem {
  int b = 64;
  int s = 1;
  int h = 128;
  int d = 128;
  int k = 512;
  DType dtype = DType::bfloat16;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("b", self.b, "batch size");
    field("s", self.s, "queries per head");
    field("h", self.h, "query heads");
    field("d", self.d, "head dimension: 64 or 128");
    field("k", self.k, "latent dimension: a multiple of 64, up to 512");
    field("dtype", self.dtype, "element type of all tensors");
  }
};

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

inline constexpr int kOutputDecompressionRows = 64;  // of a tile

// Dynamic shared memory: the matrix of the head, the ring of row boxes, the outputs of a tile, 1 KB with the barriers,
// and 1 KB to align it.
constexpr unsigned output_decompression_shared_bytes(int k, int d, int stages) {
  return 2u * unsigned(k * d + (stages * 64 + d) * kOutputDecompressionRows) + 2 * 1024;
}

}  // namespace hypermla::cute
