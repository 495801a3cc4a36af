// Numbers that the kernels share.
#pragma once

namespace hypermla::cute {

inline constexpr int kTile = 64;  // tokens of a block, rows of the largest tile, columns of a box
inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
// No finite score is below it. It is finite, so exp2(-inf - kLeastScore) is 0, not NaN.
inline constexpr float kLeastScore = -0x1.fffffep127f;
inline constexpr float kLeastExponent = -126.0f;  // of a normal number: a rescale factor is at least 2^kLeastExponent
inline constexpr float kLog2e = 1.442695040888963f, kLn2 = 0.693147180559945f;
// A running maximum is raised only when a score exceeds it by more than this, in units of log2. Weights then stay below
// 2^kRescaleThreshold, which fp16 holds and which costs no accuracy.
inline constexpr float kRescaleThreshold = 8.0f;
inline constexpr unsigned kMaxSharedBytes = 232448;  // that a thread block may have on sm_90

// How L2 treats what an access brings or leaves there, as a cache policy of PTX: what no other thread block reads need
// not stay.
enum class Keep : unsigned long long {
  normal = 0,
  evict_first = 0x12f0000000000000ull,
  evict_last = 0x14f0000000000000ull
};

}  // namespace hypermla::cute
