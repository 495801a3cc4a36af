// A read-bandwidth probe: its problem and tiling.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

struct StreamReadProblem {
  int rows = 1 << 20;  // of 1024 floats

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("rows", self.rows, "rows of 1024 floats");
  }
};

struct StreamReadTiling {
  int Br = 8;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Br", self.Br, "rows per step; they must divide the rows");
  }
};

}  // namespace hypermla
