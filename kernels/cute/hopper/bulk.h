// Copies of bytes that follow each other, from global to shared memory, by the copy engine: an instruction each.
#pragma once

#include "constants.h"
#include "mbarrier.h"

namespace hypermla::cute {

// Both addresses, and the bytes, are multiples of 16. They arrive at a barrier that expects them.
template <int bytes, Keep keep = Keep::normal>
__device__ __forceinline__ void copy_bulk(u32 shared, const void* global, u32 barrier) {
  static_assert(bytes % 16 == 0);
  if constexpr (keep == Keep::normal)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "n"(bytes), "r"(barrier)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
        "%4;" ::"r"(shared),
        "l"(global), "n"(bytes), "r"(barrier), "l"(static_cast<u64>(keep))
        : "memory");
}

}  // namespace hypermla::cute
