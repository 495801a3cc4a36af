// What the host and the device know alike of the kernels for many queries (attend_tiles.cuh).
#pragma once

namespace hypermla::cute {

inline constexpr int kRows = 128;   // queries of a tile
inline constexpr int kBlock = 128;  // tokens of a block
inline constexpr unsigned kTileThreads = 384;
inline constexpr unsigned kTileSharedBytes = 213632;  // of a thread block, see the kernels' Shared

}  // namespace hypermla::cute
