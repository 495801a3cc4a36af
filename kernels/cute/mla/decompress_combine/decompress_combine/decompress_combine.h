// The last step of an attention in parts, on Hopper: the value projection of the latent parts and the merge of all parts. The
// problem and the tiling. Read by the host and, as template arguments of the kernel, by the device compiler.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla::cute {

inline constexpr unsigned kDecompressCombineSharedBytes = 229632;  // of a thread block, see the kernel's Shared

// o = sum of weight * (o_latent w) over the latent parts + sum of weight * o_new over the decompressed parts, the weights by
// log-sum-exp, with one k x d matrix w per head.
struct DecompressCombineProblem {
  int b = 32;
  int s = 16;
  int h = 128;
  int d = 128;
  int k = 512;
  DType dtype = DType::bfloat16;
  int latent_parts = 1;
  int decompressed_parts = 1;
  bool tokens_first = false;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("b", self.b, "batch size");
    field("s", self.s, "queries per head");
    field("h", self.h, "query heads");
    field("d", self.d, "head dimension");
    field("k", self.k, "latent dimension");
    field("dtype", self.dtype, "element type of all tensors but the log-sum-exp");
    field("latent_parts", self.latent_parts, "partial outputs in the latent space");
    field("decompressed_parts", self.decompressed_parts, "partial outputs in the head dimension");
    field("tokens_first", self.tokens_first, "output [b,s,h,d] instead of [b,h,s,d]");
  }
};

struct DecompressCombineTiling {
  int blocks = 1;
  bool keep = false;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("blocks", self.blocks, "thread blocks per head, which share its rows");
    field("keep", self.keep, "leave the rows that were read in L2 as long as other data");
  }
};

}  // namespace hypermla::cute
