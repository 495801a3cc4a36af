// The work list of the latent kernel, made on the device from lengths that the host does not know.
#pragma once

#include "shards.h"
#include "work.h"

namespace hypermla::cute {

inline constexpr int kMaxPlannedRequests = 2048;
inline constexpr int kMaxWorkers = 160;
inline constexpr int kSides = 8;    // row tiles of a request that are attended side by side, where requests differ
inline constexpr int kWriters = 2;  // thread blocks that write the lists of a side, where each has workers of its own
inline constexpr int kPlanRequestsBlocks = kSides * kWriters;  // the grid

struct PlanRequestsProblem {
  int split = 0;
  bool shards = false;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("split", self.split, "token blocks after which every request is cut, whatever its batch; 0: free");
    field("shards", self.shards, "lengths are those of whole requests, of whose tokens some are here");
  }
};

struct PlanRequestsTiling {
  int threads = 320;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("threads", self.threads, "threads of a block");
  }
};

// Bits of a planner's status word: a length below 0 or beyond max_tokens; query starts that fall, or go beyond
// `queries` of a request or all_queries in all.
enum PlanStatus : int { kWrongTokens = 1, kWrongQueries = 2 };

// What the planner is told, by value. Costs are in token blocks against one row tile.
struct PlanRequestsArguments {
  const int* lengths = nullptr;  // [requests] tokens, of all shards; null: max_tokens each
  const int* query_starts =
      nullptr;  // [requests + 1], the first 0: queries of all requests before one; null: `queries` of each
  WorkItem* items = nullptr;     // [workers, rounds]
  MergeState* merges = nullptr;  // [slots]
  int* status = nullptr;         // of PlanStatus, 0 if all is well
  int requests = 0;
  int heads = 0;
  int tile_rows = 0;  // a power of two
  int workers = 0;    // thread blocks of the latent kernel
  int rounds = 0;
  int queries = 0, max_tokens = 0;  // of a request, at most
  int all_queries = 0;              // of all requests, at most
  int overhead = 0;                 // of an item, on top of its blocks
  float merge_cost = 0, part_cost = 0;
  float traffic =
      0;  // of one token block, read by one worker, as a share of what all workers read in the time of a block
  Shards shards = {};
  bool joins = false;  // the latent kernel takes up the other one of two parts
};

// How much room the lists take at most, for any lengths.
struct RequestListSizes {
  long long rounds = 0;  // items of a worker, the closing one included
  long long slots = 0;   // partial outputs
};

// For at most `b` requests of at most `blocks` token blocks and `row_tiles` row tiles each, `tiles` row tiles in all.
// split: PlanRequestsProblem's. An item costs `overhead` blocks on top of its own, a merge merge_cost, and each of its
// parts part_cost.
inline RequestListSizes request_list_sizes(int workers, long long b, long long row_tiles, long long tiles,
                                           long long blocks, int split, int overhead, double merge_cost,
                                           double part_cost) {
  const auto divided_up = [](long long value, long long divisor) { return (value + divisor - 1) / divisor; };
  const auto least_of = [](long long one, long long other) { return one < other ? one : other; };
  const long long parts = split ? divided_up(blocks, split) : 1;
  // The planner gives a group an equal share, and more only where that is cheaper than to cut. With more workers side
  // by side the passes are fewer, and so are the groups: twice the share of single workers covers what rounding adds.
  const long long share = 2 * divided_up(least_of(b * row_tiles, tiles) * (blocks + overhead), workers) + blocks;
  const long long load = share + overhead + static_cast<long long>(merge_cost + part_cost * 2 * workers) + 1;
  const long long shortest = split ? least_of(split, overhead + 1) : overhead + 1;
  return {.rounds = least_of(least_of(b * row_tiles, tiles) * parts, load / shortest + 3) + 2,
          .slots = !split      ? 2 * workers
                   : parts > 1 ? tiles * parts
                               : 1};
}

}  // namespace hypermla::cute
