// Prefill as engines call it, in CUDA Tile C++: what the kernels know when they are compiled. Read by the host and, as
// template arguments, by the device compilers.
#pragma once

#include "mla/decompressed/prefill.h"

namespace hypermla {

inline constexpr int kPrefillColumns = 128, kPrefillRope = 64;

struct PrefillTiling {
  int Bm = 64;
  int Bn = 64;
  int num_warps = 4;
  int occupancy = 1;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "queries per block");
    field("Bn", self.Bn, "tokens per step");
    field("num_warps", self.num_warps, "warps of a block that compute");
    field("occupancy", self.occupancy, "blocks that should fit on one multiprocessor");
  }
};

// What place_requests() writes of each request.
enum PrefillPlace { kFirstBlock, kFirstQuery, kQueries, kFirstToken, kTokens, kPlaces };

}  // namespace hypermla
