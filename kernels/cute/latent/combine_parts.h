// The merge of partial outputs: what it is compiled for.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla::cute {

inline constexpr int kMaxParts = 160;  // of one tile

struct CombinePartsProblem {
  DType dtype = DType::bfloat16;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("dtype", self.dtype, "element type of the output");
  }
};

struct CombinePartsTiling {
  int threads = 1024;  // the kernel learns it at run time

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("threads", self.threads, "threads of a block, in groups of 128");
  }
};

}  // namespace hypermla::cute
