// Attention over a latent cache in FP8 by clusters of two thread blocks, hand-scheduled for Hopper (sm_90a): the tiling.
// Read by the host and, as a template argument of the kernel, by the device compiler.
#pragma once

#include "mla/latent/latent.h"

namespace hypermla::cute {

inline constexpr unsigned kFlashMlaV5Threads = 512;
inline constexpr unsigned kFlashMlaV5Blocks = 2;  // of a cluster
inline constexpr int kFlashMlaV5Rows = 128;       // of a tile
inline constexpr int kFlashMlaV5Slots = 3;        // token blocks in shared memory

// Dynamic shared memory of a thread block, see the kernel's HalvesShared.
inline constexpr unsigned kFlashMlaV5SharedBytes = 230912;

struct FlashMlaV5Tiling {
  template <class Self, class Visitor>
  static constexpr void fields(Self&, Visitor&&) {}
};

}  // namespace hypermla::cute
