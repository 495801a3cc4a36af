// Attention over a latent cache in FP8 that is widened in shared memory, hand-scheduled for Hopper (sm_90a): the tiling.
// Read by the host and, as a template argument of the kernel, by the device compiler.
#pragma once

#include "mla/latent/latent.h"

namespace hypermla::cute {

inline constexpr unsigned kFlashMlaV5Threads = 512;
inline constexpr unsigned kFlashMlaV5SharedBytes = 226816;  // dynamic, of a thread block: the kernel's WidenShared

struct FlashMlaV5Tiling {
  template <class Self, class Visitor>
  static constexpr void fields(Self&, Visitor&&) {}
};

}  // namespace hypermla::cute
