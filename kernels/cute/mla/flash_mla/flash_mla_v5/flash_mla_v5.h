// Attention over a latent cache in FP8 by clusters of two thread blocks, hand-scheduled for Hopper (sm_90a): the tiling.
// Read by the host and, as a template argument of the kernel, by the device compiler.
#pragma once

#include "mla/latent/latent.h"

namespace hypermla::cute {

inline constexpr unsigned kFlashMlaV5Threads = 512;
inline constexpr unsigned kFlashMlaV5Blocks = 2;  // of a cluster
inline constexpr int kFlashMlaV5Rows = 128;       // of a tile

struct FlashMlaV5Tiling {
  int weights = 1;  // blocks of weights in shared memory; with 2 of them there are 7 half blocks of tokens, else 8

  int beside = 12;  // steps of a softmax, of 12, that are taken beside the next products

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("weights", self.weights, "token blocks whose weights are in shared memory: 1, 2");
    field("beside", self.beside, "steps of a softmax beside the next products: 0 to 12");
  }
};

// Dynamic shared memory of a thread block, see the kernel's HalvesShared.
constexpr unsigned flash_mla_v5_shared_bytes(int weights) {
  return 5 * 16384 + (weights + 2) * 16384 + (weights == 2 ? 7 : 8) * 32 * 336 + 8448;
}

}  // namespace hypermla::cute
