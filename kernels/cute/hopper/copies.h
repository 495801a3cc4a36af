// The end of copies by threads (gather.h), for threads that wait for their own.
#pragma once

namespace hypermla::cute {

// Until all copies that this thread has started are there.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Those that were started since the last call are a group.
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all groups of this thread are there but the last `pending`.
template <int pending>
__device__ __forceinline__ void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace hypermla::cute
