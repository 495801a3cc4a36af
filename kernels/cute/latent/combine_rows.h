// The merge of partial outputs of tiles of few rows: what it is compiled for.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla::cute {

struct CombineRowsProblem {
  DType dtype = DType::bfloat16;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("dtype", self.dtype, "element type of the output");
  }
};

struct CombineRowsTiling {
  int groups = 0;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("groups", self.groups,
          "groups of 128 threads that share the parts of a tile: 1, 2, 4, 8; 0: by the number of parts");
  }
};

}  // namespace hypermla::cute
