// What the host and the device know alike of the kernels for many queries (attend_tiles.cuh).
#pragma once

namespace hypermla::cute {

inline constexpr int kRows = 128;      // queries of a tile
inline constexpr int kGroupRows = 64;  // of them, of each of the two consumer warpgroups
inline constexpr int kBlock = 128;     // tokens of a block
inline constexpr unsigned kTileThreads = 384;
inline constexpr unsigned kTileSharedBytes = 213632;  // of a thread block, see the kernels' Shared

// Heads that are walked together where `fit` are the most whose keys and values fit L2. Sections are as large as each
// other: the tiles of a last one of few heads, long ones first, would be behind all others.
constexpr int heads_of_section(int heads, int fit) {
  const int sections = (heads + fit - 1) / fit;
  return (heads + sections - 1) / sections;
}

}  // namespace hypermla::cute
