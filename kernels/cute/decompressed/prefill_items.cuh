// The item of a tile's number: what the scheduler's warp does before it draws.
#pragma once

#include "hopper/warpgroup.h"
#include "prefill_list.h"

namespace hypermla::cute {

// The item that holds tile `index`, from item `at` on, which begins at or before it. All lanes of a warp.
__device__ __forceinline__ int prefill_item_of(const PrefillList* list, int index, int at) {
  const PrefillItem* items = reinterpret_cast<const PrefillItem*>(list + 1);
  for (;;) {
    const int next = at + 1 + threadIdx.x % 32;
    const unsigned begun = __ballot_sync(~0u, next < list->items && items[next].first_tile <= index);
    at += __popc(begun);
    if (begun != ~0u) return at;
  }
}

}  // namespace hypermla::cute
