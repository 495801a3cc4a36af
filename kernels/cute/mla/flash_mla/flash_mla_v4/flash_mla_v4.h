// Attention of few rows over a latent cache whose tokens are gathered, hand-scheduled for Hopper (sm_90a): its size,
// read by the host and by the device compiler.
#pragma once

#include "mla/latent/latent.h"

namespace hypermla::cute {

inline constexpr unsigned kFlashMlaV4Threads = 384;
inline constexpr int kFlashMlaV4Rows = 16;  // of a tile

// Of tokens of 656 or 576 bytes, in FP8, or of 16 bits an element: `fp8` is 0.
constexpr unsigned flash_mla_v4_token_bytes(int fp8) { return fp8 ? fp8 : 1152; }
// In shared memory: bytes from a token to the next, an odd number of 16, and half token blocks, as many as there is
// room for.
constexpr unsigned flash_mla_v4_line(int fp8) { return fp8 == 656 ? 656 : flash_mla_v4_token_bytes(fp8) + 16; }
constexpr int flash_mla_v4_halves(int fp8) { return fp8 == 576 ? 11 : fp8 ? 9 : 5; }
// Weights differ by what the token's columns are multiplied by.
constexpr int flash_mla_v4_weights(int fp8) { return fp8 == 656 ? 4 : 1; }

// Dynamic shared memory of a thread block, see the kernel's FewRowsShared.
constexpr unsigned flash_mla_v4_shared_bytes(int fp8) {
  const unsigned ring = flash_mla_v4_halves(fp8) * (32 * flash_mla_v4_line(fp8) + 24);
  return ((9 + flash_mla_v4_weights(fp8)) * 2048 + ring + 2096 + 15) / 16 * 16;
}

struct FlashMlaV4Tiling {
  template <class Self, class Visitor>
  static constexpr void fields(Self&, Visitor&&) {}
};

}  // namespace hypermla::cute
