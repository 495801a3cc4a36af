// A probe of tensor work and reads at once: its problem and tiling.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

struct StreamProductProblem {
  int rows = 1 << 22;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("rows", self.rows, "rows of 128 bfloat16 numbers");
  }
};

// Two products with every tile are 256 FLOP per byte: more than the ridge of every device with tensor cores.
struct StreamProductTiling {
  int products = 2;
  int num_warps = 4;
  int occupancy = 2;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("products", self.products, "products with every tile, 128 FLOP per byte each");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks that should fit on one multiprocessor");
  }
};

}  // namespace hypermla
