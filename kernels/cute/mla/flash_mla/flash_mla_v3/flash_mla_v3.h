// Attention over a latent cache in FP8 that is widened in registers, hand-scheduled for Hopper (sm_90a): the tiling.
// Read by the host and, as a template argument of the kernel, by the device compiler.
#pragma once

#include "mla/latent/latent.h"

namespace hypermla::cute {

inline constexpr unsigned kFlashMlaV3Threads = 512;

// In shared memory: bytes from a token to the next, of tokens of 656 or 576 bytes, and token blocks, by a tile's rows.
constexpr unsigned flash_mla_v3_line(int token_bytes) { return token_bytes == 576 ? 592 : 656; }
constexpr int flash_mla_v3_slots(int rows) { return rows == 64 ? 3 : 4; }

// Dynamic shared memory of a thread block for tokens of 656 or 576 bytes and tiles of 32 or 64 rows, see the kernel's
// WidenedShared.
constexpr unsigned flash_mla_v3_shared_bytes(int token_bytes, int rows) {
  return 11 * rows * 128 + flash_mla_v3_slots(rows) * (64 * flash_mla_v3_line(token_bytes) + 48) + rows * 84 + 3760;
}

struct FlashMlaV3Tiling {
  int rows = 64;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("rows", self.rows, "rows (heads x queries) of a tile: 32, 64");
  }
};

}  // namespace hypermla::cute
