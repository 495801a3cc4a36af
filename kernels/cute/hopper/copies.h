// The end of copies by threads (gather.h), for a kernel that waits for all of them at once.
#pragma once

namespace hypermla::cute {

// Until all copies that this thread has started are there.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace hypermla::cute
