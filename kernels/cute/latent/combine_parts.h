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
  int blocks = 0;
  int groups = 0;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("blocks", self.blocks,
          "thread blocks that share the columns of a tile: 1 to 32, a power of two; 0: by the number of tiles");
    field("groups", self.groups,
          "groups of 128 threads that share the parts of a tile: 1, 2, 4, 8; 0: by the number of parts");
  }
};

}  // namespace hypermla::cute
