// How the parts of a tile find out that all of them are stored, and who merges which shares (prefill_parts.cuh).
#pragma once

#include "hopper/global.h"
#include "hopper/warpgroup.h"
#include "prefill_list.h"

namespace hypermla::cute {

// How long a part waits for the others, about 40 us, some twenty times what parts differ by: not all may have found a
// multiprocessor, since a stream may have fewer than the device. The last one merges the share of one that leaves.
inline constexpr unsigned kPartsPatience = 1 << 16;  // clocks

// How a warpgroup goes on when it has stored its part, as one thread of it finds out.
struct PartsLeft {
  bool complete = false;   // all parts are there
  unsigned shares_of = 0;  // other parts whose thread blocks did not wait: bits
};

// The low half of `arrived` counts parts that are stored and then, of tiles whose parts run together, those that have
// seen that all are; its high half are bits of those that did not wait for it. The last one leaves 0 for the next
// launch.
__device__ __forceinline__ PartsLeft arrive(unsigned long long* arrived, const PrefillTile& tile) {
  const auto low = [](unsigned long long x) { return static_cast<unsigned>(x); };
  const auto high = [](unsigned long long x) { return static_cast<unsigned>(x >> 32); };
  fence_all();
  const unsigned parts = tile.parts;
  unsigned long long before = atomicAdd(arrived, 1ull);
  PartsLeft found = {.complete = low(before) == parts - 1};
  if (found.complete) found.shares_of = high(before);
  if (!tile.together) {
    if (found.complete) *arrived = 0;
  } else {
    const unsigned start = static_cast<unsigned>(clock64());
    while (!found.complete) {
      const unsigned long long now = load_acquire(arrived);
      found.complete = low(now) >= parts;
      if (!found.complete && static_cast<unsigned>(clock64()) - start >= kPartsPatience &&
          atomicCAS(arrived, now, now | 1ull << (32 + tile.part)) == now)
        break;
    }
    if (found.complete) {
      before = atomicAdd(arrived, 1ull);
      if (low(before) + 1 + __popc(high(before)) == 2 * parts) *arrived = 0;
    }
  }
  fence_all();
  return found;
}

}  // namespace hypermla::cute
