// The end of copies by threads (gather.h), for threads that wait for their own.
#pragma once

namespace hypermla::cute {

// Until all copies that this thread has started are there.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// What this thread has started since the last such call is a group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until the groups of this thread are there, but for the last n.
template <int n>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

}  // namespace hypermla::cute
