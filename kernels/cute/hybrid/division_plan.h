// How long both paths of the hybrid take at once, by how many multiprocessors each has: for versions that divide them.
#pragma once

#include <algorithm>

#include "hypermla/plan/hybrid.h"

namespace hypermla::cute {

// What one multiprocessor computes in the latent path and streams in the other, each beside the other path, and what
// memory gives all that stream; a second.
struct PathRates {
  double latent_flops, streamed_bytes, memory_bytes;

  // Seconds, with `streams` of the `processors` on the decompressed path.
  template <class Problem>
  double seconds(const Problem& at, int streams, int processors) const {
    const double rows = double(at.b) * at.h * at.s, width = dtype_bytes(at.dtype);
    const double flops = 2 * rows * latent_tokens(at) * (2 * at.k + at.p);
    const double bytes = width * at.b * new_tokens(at) * (2.0 * at.h * at.d + at.p);
    return std::max(flops / (latent_flops * (processors - streams)),
                    bytes / std::min(streamed_bytes * streams, memory_bytes));
  }
};

}  // namespace hypermla::cute
