// The last step of an attention in parts, the merge with the value projection of the latent parts: the problem of every
// version, in every language. Read by the host and, as a template argument of the kernels, by the device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

// o = sum of weight * (o_latent w) over the latent parts + sum of weight * o_new over the decompressed parts, the
// weights by log-sum-exp, with one k x d matrix w per head.
struct CombineProblem {
  int b = 64;
  int s = 1;
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
    field("dtype", self.dtype, "element type of all tensors but the log-sum-exps");
    field("latent_parts", self.latent_parts, "partial outputs in the latent space");
    field("decompressed_parts", self.decompressed_parts, "partial outputs of the head dimension");
    field("tokens_first", self.tokens_first, "output [b,s,h,d] instead of [b,h,s,d]");
  }
};

}  // namespace hypermla
