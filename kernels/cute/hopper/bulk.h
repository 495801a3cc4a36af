// Copies of bytes that follow each other, from global to shared memory, by the copy engine: an instruction each.
#pragma once

#include "mbarrier.h"

namespace hypermla::cute {

// Both addresses, and the bytes, are multiples of 16. They arrive at a barrier that expects them.
template <int bytes>
__device__ __forceinline__ void copy_bulk(u32 shared, const void* global, u32 barrier) {
  static_assert(bytes % 16 == 0);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "n"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace hypermla::cute
