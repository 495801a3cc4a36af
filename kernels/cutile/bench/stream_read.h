// A read-bandwidth probe: its problem and tiling.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

struct StreamReadProblem {
  int rows = 1 << 22;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("rows", self.rows, "rows of 256 floats");
  }
};

struct StreamReadTiling {
  int Br = 16;
  int occupancy = 2;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Br", self.Br, "rows per step; they must divide the rows");
    field("occupancy", self.occupancy, "blocks that should fit on one multiprocessor");
  }
};

}  // namespace hypermla
