// The end of copies by threads (gather.h), for threads that wait for their own.
#pragma once

namespace hypermla::cute {

// Until all copies that this thread has started are there.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace hypermla::cute
