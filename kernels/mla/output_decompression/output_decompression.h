// Decompression of latent attention outputs to the head dimension: the problem of every version, in every language.
// Read by the host and, as a template argument of the kernels, by the device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

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
    field("d", self.d, "head dimension");
    field("k", self.k, "latent dimension");
    field("dtype", self.dtype, "element type of all tensors");
  }
};

}  // namespace hypermla
