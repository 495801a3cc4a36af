// Stands in for kernels/cute/hopper/global.h where thread blocks are threads of the system. A clock is a nanosecond.
#pragma once

#include <chrono>

#include "hopper/warpgroup.h"

namespace hypermla::cute {

inline void fence_all() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline unsigned long long load_acquire(const unsigned long long* from) {
  return std::atomic_ref(*const_cast<unsigned long long*>(from)).load(std::memory_order_acquire);
}
inline unsigned long long atomicAdd(unsigned long long* x, unsigned long long more) {
  return std::atomic_ref(*x).fetch_add(more, std::memory_order_relaxed);
}
inline unsigned long long atomicCAS(unsigned long long* x, unsigned long long wanted, unsigned long long value) {
  std::atomic_ref(*x).compare_exchange_strong(wanted, value, std::memory_order_relaxed);
  return wanted;
}
inline long long clock64() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

}  // namespace hypermla::cute
