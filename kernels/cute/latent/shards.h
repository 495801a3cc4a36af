// Which tokens of a request are here, where several GPUs share its context.
#pragma once

namespace hypermla::cute {

// Division by what the host knows, as a multiplication: of numbers below 2^32 / by, by at most 2^31 - 1.
struct Divisor {
  int by = 1;
  unsigned reciprocal = 0;  // 2^32 / by, rounded up; 0: by is 1

  constexpr Divisor() = default;
  constexpr explicit Divisor(int by) : by(by), reciprocal(by == 1 ? 0 : 0xffffffffu / by + 1) {}
#ifdef __CUDACC__
  __device__ __forceinline__ unsigned divide(unsigned x) const { return reciprocal ? __umulhi(x, reciprocal) : x; }
#else
  unsigned divide(unsigned x) const {
    return reciprocal ? static_cast<unsigned>(static_cast<unsigned long long>(x) * reciprocal >> 32) : x;
  }
#endif
};

// The tokens of a request are dealt to `shards` GPUs in turns of `turn` tokens. Shard 1 of 3, in turns of 2: tokens 2,
// 3, 8, 9, 14, .. are those of index 0, 1, 2, 3, 4, .. here.
struct Shards {
  Divisor period = {};  // tokens from a turn of the shard to its next
  Divisor turn = {};
  int first = 0;  // token

  constexpr Shards() = default;
  constexpr Shards(int shards, int shard, int turn) : period(shards * turn), turn(turn), first(shard * turn) {}

#ifdef __CUDACC__
#define HYPERMLA_SHARDS_FUNCTION __device__ __forceinline__
#else
#define HYPERMLA_SHARDS_FUNCTION inline
#endif
  // How many of the first `tokens` tokens are here; of less than none there are none.
  HYPERMLA_SHARDS_FUNCTION int count(int tokens) const {
    if (tokens <= 0) return 0;
    const int turns = static_cast<int>(period.divide(static_cast<unsigned>(tokens)));
    const int behind = tokens - turns * period.by - first;  // of the last, incomplete period
    return turns * turn.by + (behind < 0 ? 0 : behind < turn.by ? behind : turn.by);
  }
  // Which token of the request has an index here.
  HYPERMLA_SHARDS_FUNCTION int position(int index) const {
    return index + static_cast<int>(turn.divide(static_cast<unsigned>(index))) * (period.by - turn.by) + first;
  }
#undef HYPERMLA_SHARDS_FUNCTION
};

}  // namespace hypermla::cute
