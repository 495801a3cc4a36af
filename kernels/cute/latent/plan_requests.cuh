// Divides requests of any lengths and numbers of queries among the workers of the latent kernel.
//
// Workers form groups of `side` that walk the same tokens side by side, each with a row tile of its own; a request of
// more row tiles is attended in passes. Every group gets a range of the token blocks of all passes, laid end to end.
// There are four divisions, and the cheapest is taken:
//
//   pieces   each pass in equal pieces, one piece a group: where there are at least as many groups as passes; fewer
//            pieces than groups, or only whole passes, where merging them costs more than it gains
//   line     `overhead` in front of each pass, and the whole cut into equal ranges; a cut near an end of a pass moves
//            there, so that no piece is shorter than what an item costs
//   whole    the cuts of `line` moved to the nearest ends of passes: nothing is cut, and nothing has to be merged
//   dealt    whole passes too, but the long ones first, dealt to the groups there and back as cards are: where lengths
//            differ and a group has few passes, two long ones that follow each other fall to different groups
//
// All layers of a step wait for it, and it runs once: what counts is how long its one chain of instructions is. So
// every thread block goes through it with few warps, and writes the lists of some of the workers. Requests that are all
// alike in row tiles and token blocks, which is common, are divided by formulas, without sums and searches over the
// requests, by code of their own; so are those that have as many passes each, with one sum. The lists are the same.
//
// With problem.split, requests are cut at multiples of it and nowhere else, and every piece is an item of its own.
//
// grid = kPlanRequestsBlocks. A request without queries has no items; one without tokens has a block, all masked.
// Lengths and numbers of queries beyond the arguments' limits are cut to them, and reported. Where query starts fall
// nothing is planned: requests would share queries, and be more than the lists have room for. With problem.shards a
// length counts the tokens in all caches, of which those in this one are divided.
#pragma once

#include "hopper/warpgroup.h"
#include "plan_requests.h"
#include "work.h"

namespace hypermla::cute {

// Division of numbers from 0 on by one that is known before, or several times the same: half of what an integer
// division takes, or a fifth. The reciprocal, the number and their product are rounded, by 2^-22 and twice 2^-24 of the
// quotient at most: below 2^21 that is less than 1, so one step up or down is all there is to correct. Of numbers below
// 2^24, which a float holds, quotients may be up to 3 * 2^20.
struct Quotient {
  int by;
  float reciprocal;

  __device__ __forceinline__ explicit Quotient(int by) : by(by), reciprocal(reciprocal_fast(static_cast<float>(by))) {}
  __device__ __forceinline__ int of(int x) const {
    const int near = static_cast<int>(static_cast<float>(x) * reciprocal), rest = x - near * by;
    return near + (rest >= by) - (rest < 0);
  }
  __device__ __forceinline__ int up(int x) const { return of(x + by - 1); }
};

// Where a group of workers begins: a pass among all, and a token block in it. Where that is not the first block, the
// pass is cut, and the group has a part of it.
struct Cut {
  int pass, block;
  short part, parts;
};
__device__ __forceinline__ Cut cut_at(int pass, int block = 0, int part = 0, int parts = 1) {
  return {pass, block, static_cast<short>(part), static_cast<short>(parts)};
}

// Sums of `count` values each of the threads before this one, and of all threads, in two steps between which all
// threads meet. `of_warps`: the sums of every warp.
template <int count>
struct SumsBefore {
  int before[count], all[count];
};
template <int count, int warps>
__device__ __forceinline__ SumsBefore<count> sums_in_warp(const int (&own)[count], int (*of_warps)[warps]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  SumsBefore<count> sums;
#pragma unroll
  for (int i = 0; i < count; ++i) sums.before[i] = own[i];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int below = __shfl_up_sync(~0u, sums.before[i], step);
      if (lane >= step) sums.before[i] += below;
    }
  }
#pragma unroll
  for (int i = 0; i < count; ++i) {
    if (lane == 31) of_warps[i][warp] = sums.before[i];
    sums.before[i] -= own[i];
  }
  return sums;
}
// Sum of one value of each lane up to the one that is `lane` among `width`, a power of two.
template <int width = 32>
__device__ __forceinline__ int sum_upto(int value, int lane) {
#pragma unroll
  for (int step = 1; step < width; step *= 2) {
    const int below = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += below;
  }
  return value;
}
template <int count, int warps>
__device__ __forceinline__ void add_warps(SumsBefore<count>& sums, int (*of_warps)[warps]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int of_warp = lane < warps ? of_warps[i][lane] : 0;
    sums.before[i] += __reduce_add_sync(~0u, lane < warp ? of_warp : 0);
    sums.all[i] = __reduce_add_sync(~0u, of_warp);
  }
}
template <int threads, int count>
__device__ __forceinline__ SumsBefore<count> sums_before(const int (&own)[count], int (*of_warps)[threads / 32]) {
  SumsBefore<count> sums = sums_in_warp(own, of_warps);
  __syncthreads();
  add_warps(sums, of_warps);
  return sums;
}
struct SumBefore {
  int before, all;
};
template <int threads>
__device__ __forceinline__ SumBefore sum_before(int own, int (&of_warps)[threads / 32]) {
  const SumsBefore<1> sum = sums_before<threads>({own}, &of_warps);
  return {sum.before[0], sum.all[0]};
}

// The last of the `count` ranges that begins at or before `at`, of those that begin at begins[0], begins[1], ... and
// end at begins[count]. Eight ways at a time, whose loads are on their way together: what counts is how often a thread
// waits for shared memory.
__device__ __forceinline__ int range_of(const int* begins, int count, int at) {
  static_assert(kMaxPlannedRequests <= 8 * 512);
  int low = 0;
#pragma unroll 1
  for (int step = count > 512 ? 512 : count > 64 ? 64 : 8; step > 0; step /= 8) {
    int begin[7], ways = 0;
#pragma unroll
    for (int i = 0; i < 7; ++i) begin[i] = begins[min(low + (i + 1) * step, count)];
#pragma unroll
    for (int i = 0; i < 7; ++i) ways += begin[i] <= at;
    low += ways * step;
  }
  return min(low, count - 1);
}

// How many workers attend row tiles of a request side by side, for requests of `row_tiles` tiles each: what leaves the
// fewest of them idle. Tiles that walk side by side share the tokens' reads, so few passes are better.
__device__ __forceinline__ int side_for(int row_tiles, int workers) {
  if (row_tiles < 15 && row_tiles <= workers) return max(row_tiles, 1);  // two passes are of less than 8 each
  int best = 1;
  float best_use = 0;
#pragma unroll 1
  for (int passes = 1; passes <= row_tiles; ++passes) {
    const int side = Quotient(passes).up(row_tiles);
    if (side > workers) continue;
    if (passes > 1 && side < 8 && best_use > 0) break;
    const float use =
        static_cast<float>(row_tiles) * Quotient(side).of(workers) / (static_cast<float>(passes) * workers);
    if (use > best_use + 0.04f) {
      best = side;
      best_use = use;
    }
  }
  return best;
}

// The side that suits a request of its own row tiles, up to kSides, makes few passes of as many tiles each. How many,
// if it is this one; else 0.
__device__ __forceinline__ int passes_of_own_side(int tiles, int side) {
  const int passes = (tiles + kSides - 1) / kSides;
  return (side - 1) * passes < tiles && tiles <= side * passes ? passes : 0;
}

// What is known of the requests: nothing, or that those with queries have as many passes each, or that all are alike in
// row tiles and token blocks.
enum class Known { nothing, passes, all };
template <Known what>
struct Requests {
  static constexpr Known known = what;
};

template <PlanRequestsProblem problem, PlanRequestsTiling tiling>
__global__ void __launch_bounds__(tiling.threads, 1) plan_requests(const __grid_constant__ PlanRequestsArguments with) {
  constexpr int kThreads = tiling.threads, kWarps = kThreads / 32, split = problem.split;
  static_assert(kThreads > kMaxWorkers && kWarps <= 32);
  constexpr int kSums = kMaxPlannedRequests + 1;
  constexpr int kTried = kSides + 2;  // sides for all: powers of two; common, the least and the most tiles
  constexpr int kClasses = 32;        // of lengths, where passes are dealt: a lane has one
  struct Chosen {
    int side, groups, first_worker, used;
  };
  // Where passes are dealt there are no pieces.
  union OfParts {
    int first_part[kSums];  // pieces, or parts, of the requests before one
    struct {
      unsigned short order[kMaxPlannedRequests];  // requests, the long ones first
      int in_class[kWarps][kClasses + 1], place[kWarps][kClasses + 1];
    } dealt;
  };
  struct Shared {
    int tokens_of[kMaxPlannedRequests];
    unsigned short tiles_of[kMaxPlannedRequests];
    int query_start[kSums];  // where queries differ
    // Sums over the requests before one: `overhead` and blocks of all passes; passes.
    int start[kSums], first_pass[kSums];
    OfParts of_parts;
    int extremes[3][kWarps], all_wrong, sums[2][kWarps], side_sums[2][kWarps], part_sums[1][kWarps];
    int counts[2][kWarps], pieces_of_high;
    float cost_of_side[kTried];
    int tried_side[kTried];
    int work_of_side[kSides], blocks_of_side[kSides];
    Chosen own_sides, one_side;
    float cost_of_own_sides, cost_of_one_side;
    Cut cuts[kMaxWorkers + 1];                                       // of `line`, of every group and behind the last
    int whole_cuts[kMaxWorkers + 1], whole_starts[kMaxWorkers + 1];  // of `whole`: passes, and their begins on the line
  };
  __shared__ Shared memory;
  auto& [tokens_of, tiles_of, query_start, start, first_pass, of_parts, extremes, all_wrong, sums, side_sums, part_sums,
         counts, pieces_of_high, cost_of_side, tried_side, work_of_side, blocks_of_side, own_sides, one_side,
         cost_of_own_sides, cost_of_one_side, cuts, whole_cuts, whole_starts] = held_address(memory);
  int(&first_part)[kSums] = of_parts.first_part;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int b = with.requests, overhead = with.overhead, workers = with.workers;
  // As many queries of each request, and all of them counted on: the queries of each request are known without a load.
  const bool equal_queries = !with.query_starts && static_cast<long long>(b) * with.queries <= with.all_queries;

  auto blocks_of = [&](int request) { return max(1, (tokens_of[request] + 63) >> 6); };
  auto parts_of_split = [&](int blocks) { return split && blocks > split ? (blocks + split - 1) / split : 0; };
  auto whole_of = [&](int request) {
    if constexpr (problem.shards)
      return min(max(with.lengths[request], 0), with.max_tokens);
    else
      return 0;
  };
  auto queries_before = [&](int request) { return equal_queries ? request * with.queries : query_start[request]; };
  auto queries_between = [&](int before, int behind) {
    const int queries = min(max(behind - before, 0), with.queries);
    return before >= 0 && before <= with.all_queries - queries ? queries : 0;
  };

  const int shift = __ffs(with.tile_rows) - 1;
  auto tiles_for = [&](int queries) { return (queries * with.heads + with.tile_rows - 1) >> shift; };

  // How requests of as many row tiles each are attended: `passes` of each, by `groups` groups of `side` workers.
  struct Sides {
    int side, groups, passes;
    Quotient by_groups_of_pass;  // where there are at least as many groups as passes
  };
  auto sides_for = [&](int tiles) {
    const Quotient by_side(side_for(tiles, workers));
    const int groups = by_side.of(workers), passes = by_side.up(tiles);
    return Sides{by_side.by, groups, passes, Quotient(max(Quotient(max(b * passes, 1)).of(groups), 1))};
  };
  launch_next();
  // What needs no lengths is worked out while the kernels before this one end.
  Sides sides = equal_queries ? sides_for(tiles_for(with.queries)) : Sides{1, 0, 0, Quotient(1)};
  wait_for_previous();
  // All loads of a thread are on their way at once. Every thread reads the first request, too.
  constexpr int kOwn = (kMaxPlannedRequests + kThreads - 1) / kThreads;
  int tokens_of_own[kOwn], before_own[kOwn], behind_own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int r = thread + i * kThreads;
    tokens_of_own[i] = with.lengths && r < b ? with.lengths[r] : with.max_tokens;
    before_own[i] = r * with.queries;
    behind_own[i] = before_own[i] + with.queries;
    if (with.query_starts && r < b) {
      before_own[i] = with.query_starts[r];
      behind_own[i] = with.query_starts[r + 1];
    }
  }
  int first_tokens = with.max_tokens, first_before = 0, first_behind = 0;
  if (with.lengths && b > 0) first_tokens = with.lengths[0];
  if (with.query_starts && b > 0) {
    first_before = with.query_starts[0];
    first_behind = with.query_starts[1];
  }
  constexpr int kFalls = kWrongQueries << 1;     // in no status
  enum { kMostTiles, kLessTiles, kMostBlocks };  // the least as the most of the negative
  constexpr int kNone = -0x7fffffff;
  struct Size {
    int tokens, blocks, tiles, flags;
  };
  auto size_of = [&](int tokens_said, int before, int behind) {
    int queries = with.queries, flags = 0;
    if (!equal_queries) {
      queries = queries_between(before, behind);
      if (queries != behind - before) flags |= behind < before ? kFalls | kWrongQueries : kWrongQueries;
    }
    int tokens = min(max(tokens_said, 0), with.max_tokens);
    if (tokens != tokens_said) flags |= kWrongTokens;
    if constexpr (problem.shards) tokens = with.shards.count(tokens);
    const int tiles = tiles_for(queries);
    return Size{tokens, max(1, (tokens + 63) >> 6), tiles, flags};
  };
  const Size first_size = size_of(first_tokens, first_before, first_behind);
  int most[3] = {0, kNone, 0};
  bool differs = b == 0;  // from the first request, or something is to be reported
  int own_sums[2] = {}, wrong = 0;
  if (thread == 0) all_wrong = pieces_of_high = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int r = thread + i * kThreads;
    if (r >= b) break;
    if (!equal_queries) {
      query_start[r] = before_own[i];
      if (r == b - 1) query_start[b] = behind_own[i];
    }
    const Size size = size_of(tokens_of_own[i], before_own[i], behind_own[i]);
    tokens_of[r] = size.tokens;
    tiles_of[r] = static_cast<unsigned short>(size.tiles);
    differs |= size.flags || size.tiles != first_size.tiles || size.blocks != first_size.blocks;
    wrong |= size.flags;
    most[kMostTiles] = max(most[kMostTiles], size.tiles);
    if (size.tiles > 0) {
      own_sums[0] += size.blocks;
      ++own_sums[1];
      most[kLessTiles] = max(most[kLessTiles], -size.tiles);
      most[kMostBlocks] = max(most[kMostBlocks], size.blocks);
    }
  }
  // Of the requests with queries, their token blocks and their number: of all, and before the thread's own, if it has
  // only one.
  SumsBefore<2> sum_of = {};
  const bool all_alike =
      !__syncthreads_or(differs) && first_size.tiles > 0 && static_cast<long long>(b) * first_size.tiles < 1 << 20;
  if (all_alike) {
    most[kMostTiles] = first_size.tiles;
    most[kLessTiles] = -first_size.tiles;
    most[kMostBlocks] = first_size.blocks;
  } else {
    if (wrong) atomicOr(&all_wrong, wrong);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      most[i] = __reduce_max_sync(~0u, most[i]);
      if (lane == 0) extremes[i][warp] = most[i];
    }
    sum_of = sums_before<kThreads, 2>(own_sums, sums);
#pragma unroll
    for (int i = 0; i < 3; ++i) most[i] = __reduce_max_sync(~0u, extremes[i][lane % kWarps]);
    wrong = all_wrong;
  }
  if (blockIdx.x == 0 && thread == 0) *with.status = wrong & ~kFalls;
  const int least_tiles = -most[kLessTiles], most_tiles = most[kMostTiles], longest = most[kMostBlocks];
  int first_worker = 0, used = 0;
  // Of a side with workers of its own, passes, and `overhead` and blocks of these: a request of each thread but those
  // of two warps.
  constexpr int kAdders = kThreads - 64;
  const int adder = thread - 64;
  SumsBefore<2> of_side = {};

  // The rest, by what is known of the requests.
  auto divide = [&](auto of_what) {
    constexpr bool alike = of_what.known == Known::all, same = of_what.known != Known::nothing;
    const bool shared_out = !same && used > 0;  // workers of other sides attend the others
    const int side = sides.side, groups = sides.groups;
    if (!shared_out) used = side * groups;
    if (blockIdx.x == 0) {
#pragma unroll 1
      for (int worker = used + thread; worker < workers; worker += kThreads)
        with.items[static_cast<long long>(worker) * with.rounds] = {};
    }
    if (groups == 0) return;
    const Quotient by_side(side);
    const int equal_passes = sides.passes;
    const bool no_gaps = same && (alike || sum_of.all[1] == b);  // the passes before a request are known without a sum
    auto passes_of = [&](int request) {
      const int tiles = tiles_of[request];
      if constexpr (same)
        return tiles ? equal_passes : 0;
      else
        return shared_out ? passes_of_own_side(tiles, side) : by_side.up(tiles);
    };

    // Writes the sums over the requests before one to before[i][0 .. b], of what add() adds to the i-th for a request.
    const int each = (b + kThreads - 1) / kThreads, first = min(b, thread * each), last = min(b, first + each);
    auto write_sums = [&]<int count>(int(*of_warps)[kWarps], int* const(&before)[count], auto add) {
      int own[count] = {};
#pragma unroll 1
      for (int r = first; r < last; ++r) add(r, own);
      SumsBefore<count> sum = sums_before<kThreads, count>(own, of_warps);
#pragma unroll
      for (int i = 0; i < count; ++i)
        if (thread == 0) before[i][b] = sum.all[i];
#pragma unroll 1
      for (int r = first; r < last; ++r) {
#pragma unroll
        for (int i = 0; i < count; ++i) before[i][r] = sum.before[i];
        if (each > 1) add(r, sum.before);
      }
      return sum;
    };
    int all = 0, total = 0;  // passes; their blocks, and `overhead` of each
    if constexpr (alike) {
      all = b * equal_passes;
      total = all * (longest + overhead);
    } else {
      if (same && b <= kThreads) {
        auto start_for = [&](int blocks, int requests) { return equal_passes * (blocks + requests * overhead); };
        all = equal_passes * sum_of.all[1];
        total = start_for(sum_of.all[0], sum_of.all[1]);
        if (thread < b) {
          first_pass[thread] = equal_passes * sum_of.before[1];
          start[thread] = start_for(sum_of.before[0], sum_of.before[1]);
        }
        if (thread == 0) first_pass[b] = all, start[b] = total;
      } else if (shared_out && b <= kAdders) {
        add_warps(of_side, side_sums);
        all = of_side.all[0];
        total = of_side.all[1];
        if (adder >= 0 && adder < b) first_pass[adder] = of_side.before[0], start[adder] = of_side.before[1];
        if (thread == 0) first_pass[b] = all, start[b] = total;
      } else {
        const SumsBefore<2> sum = write_sums(side_sums, {first_pass, start}, [&](int r, int(&to)[2]) {
          const int passes = passes_of(r);
          to[0] += passes;
          to[1] += passes * (blocks_of(r) + overhead);
        });
        all = sum.all[0];
        total = sum.all[1];
      }
      if constexpr (split)
        write_sums(part_sums, {first_part},
                   [&](int r, int(&to)[1]) { to[0] += tiles_of[r] * parts_of_split(blocks_of(r)); });
    }
    const Quotient by_passes(max(equal_passes, 1)), by_groups(groups);
    auto first_pass_of = [&](int request) { return no_gaps ? request * equal_passes : first_pass[request]; };
    auto request_of_pass = [&](int v) { return no_gaps ? by_passes.of(v) : range_of(first_pass, b, v); };

    const unsigned even = static_cast<unsigned>(total + groups - 1) / static_cast<unsigned>(groups);
    const int range = max(static_cast<int>(even), overhead + 1);
    // Where the kernel takes up one of two parts, a pass that is cut once costs an item more; parts of others are
    // written and merged. With fewer passes than groups some are cut twice or more.
    const int merged = with.joins ? min(3 * max(groups - all, 0), groups + all) : groups + min(groups, all);
    const float merges = with.part_cost * static_cast<float>(merged * side);
    const float cost_of_line =
        range + overhead + with.merge_cost + (with.joins ? max(static_cast<float>(overhead), merges) : merges);

    // The division `pieces`: the shortest length that makes no more pieces than groups, found by a search in which
    // every warp tries another length. But none that is shorter than the cheapest: the step takes the length of a
    // piece, and `part_cost` for each part. The sum is least where that length is the square root of part_cost times
    // the blocks of all row tiles. Rounded up from a fraction of 0.8 on: the sum is flat there, and parts cost less the
    // fewer a tile has.
    int piece = 0, pieces = 0, pieces_of_longest = 0;
    if (!split && all > 0 && all <= groups) {
      auto cost_of_pieces = [&](int length, int count) {  // a pass in one piece has no parts
        const int parts = min(count, 2 * (count - all)) * side;
        return length + overhead + with.merge_cost + with.part_cost * static_cast<float>(parts);
      };
      // Pieces that were counted to cost as much as whole passes, 10 blocks, took 2 less. So do they beside the line
      // where lengths differ: then more of its cuts move to ends of passes, and ranges get longer.
      const bool equal = total == all * (longest + overhead);
      const float cost_uncut = longest + overhead,
                  best_other = min(1.1f * cost_uncut, cost_of_line + (equal ? 0 : with.merge_cost));
      const int sum = total - overhead * all;
      auto cheapest = [&] {
        return min(longest, static_cast<int>(sqrtf(with.part_cost * static_cast<float>(side * sum)) + 0.2f));
      };
      if (alike) {
        piece = max(sides.by_groups_of_pass.up(longest), cheapest());
        pieces_of_longest = Quotient(piece).up(longest);
        pieces = all * pieces_of_longest;
      } else {
        auto pieces_of = [&](int length) {
          const Quotient by_length(length);
          int count = 0;
#pragma unroll 4
          for (int r = lane; r < b; r += 32) count += passes_of(r) * by_length.up(blocks_of(r));
          return static_cast<int>(__reduce_add_sync(~0u, count));
        };
        // None that costs more than the others, even if it made only one piece more than there are passes.
        int low = 1, high = min(longest, static_cast<int>(best_other - cost_of_pieces(0, all + 1)));
        bool longer = false;  // which makes one piece more at least
#pragma unroll 1
        for (int r = thread; r < b; r += kThreads) longer |= passes_of(r) > 0 && blocks_of(r) > high;
        bool may_fit = __syncthreads_count(longer) <= groups - all;
        if (same && may_fit && all > groups / 4) {  // most often too many, which all warps together find sooner
          const Quotient by_high(max(high, 1));
          int own = 0;
#pragma unroll 1
          for (int r = thread; r < b; r += kThreads) own += passes_of(r) * by_high.up(blocks_of(r));
          own = __reduce_add_sync(~0u, own);
          if (lane == 0) atomicAdd(&pieces_of_high, own);
          __syncthreads();
          may_fit = pieces_of_high <= groups;
        }
        if (may_fit) {
          low = max(max(1, by_groups.up(sum)), cheapest());
          if (all < groups) high = min(high, max(low, Quotient(groups - all).of(sum + groups - all - 1)));
        } else {
          high = 0;
        }
        // Each round finds the shortest that fits of those that the warps try, `high` the last of them.
        for (int round = 0; low <= high && (round == 0 || low < high); ++round) {
          const int span = high - low, count = pieces_of(low + span * (warp + 1) / kWarps);
          if (lane == 0) counts[round % 2][warp] = count;
          __syncthreads();
          const int of_warp = counts[round % 2][lane % kWarps];
          const unsigned fit = __ballot_sync(~0u, lane < kWarps && of_warp <= groups);
          if (!fit) break;
          const int found = __ffs(fit) - 1;
          piece = high = low + span * (found + 1) / kWarps;
          pieces = __shfl_sync(~0u, of_warp, found);
          if (found > 0) low += span * found / kWarps + 1;
        }
      }
      if (piece == 0 || cost_of_pieces(piece, pieces) > best_other) {
        piece = cost_uncut > cost_of_line ? 0 : longest;
        pieces = all;
        pieces_of_longest = 1;
      }
    }

    struct Piece {  // all that a group attends
      int request;
      Cut from, to;
    };
    const Quotient by_piece(max(piece, 1));
    auto piece_of = [&](int g) {
      int request = 0, of = pieces_of_longest, inside = g, blocks = longest, before = 0;
      if (!alike) {
        request = range_of(first_part, b, g);
        blocks = blocks_of(request);
        of = by_piece.up(blocks);
        inside = g - first_part[request];
        before = first_pass_of(request);
      }
      const Quotient by_pieces(of);
      const int pass = by_pieces.of(inside), part = inside - pass * of, v = before + pass;
      if (g >= pieces) return Piece{0, cut_at(all), cut_at(all)};
      const Cut from = cut_at(v, by_pieces.of(part * blocks), part, of);
      const Cut to = part + 1 < of ? cut_at(v, by_pieces.of((part + 1) * blocks), part + 1, of) : cut_at(v + 1);
      return Piece{alike ? by_passes.of(v) : request, from, to};
    };
    struct Line {
      Cut cut;
      int nearest, nearest_start;  // the end of a pass, and where on the line it is
    };
    const Quotient by_range(range);
    auto line_at = [&](int g) {
      const int at = range * min(g, groups);
      if (g > groups || at >= total) return Line{cut_at(all), all, total};
      int blocks = longest, before = 0, start_before = 0;
      if (!alike) {
        const int request = range_of(start, b, at);
        blocks = blocks_of(request);
        before = first_pass_of(request);
        start_before = start[request];
      }
      const int weight = blocks + overhead, pass = Quotient(weight).of(at - start_before);
      const int inside = at - start_before - pass * weight, later = inside > weight / 2;
      const int nearest_start = start_before + (pass + later) * weight, v = before + pass;
      const int block = max(0, inside - overhead);
      const int least = max(overhead, 1);
      Cut cut = cut_at(v);
      if (split) {
        cut.block = (block + split / 2) / max(split, 1) * split;
        if (cut.block >= blocks) ++cut.pass, cut.block = 0;
      } else if (block >= least && blocks - block < least) {
        ++cut.pass;
      } else if (block >= least) {
        // Boundaries are `range` apart, and those cut the pass that are not near its ends.
        const int part = by_range.of(inside - overhead - least) + 1;
        cut = cut_at(v, block, part, part + 1 + by_range.of(overhead + blocks - least - inside));
      }
      return Line{cut, v + later, nearest_start};
    };

    if (!alike && piece > 0)
      write_sums(part_sums, {first_part},
                 [&](int r, int(&to)[1]) { to[0] += passes_of(r) * by_piece.up(blocks_of(r)); });
    if (!alike) __syncthreads();

    // The division `dealt`: a group has at most one pass of each round. The last round may be for some only: for those
    // that had the shorter ones until then.
    const int rounds = by_groups.up(all);
    auto dealt_to = [&](int g, int round) {  // a pass in the order of dealing; if there is none, `all` or more
      const int late = round == rounds - 1 ? rounds * groups - all : 0;
      return round * groups + (round % 2 ? groups - 1 - g : g < late ? all : g - late);
    };
    auto request_dealt = [&](int at) { return of_parts.dealt.order[same ? by_passes.of(at) : at]; };
    auto pass_dealt = [&](int at) { return same ? at - by_passes.of(at) * equal_passes : 0; };
    // Sorts the requests with passes, roughly: within a class as they come, so that all thread blocks do the same.
    auto sort = [&] {
      auto& [order, in_class, place] = of_parts.dealt;
      const float classes = longest > kClasses ? kClasses * reciprocal_fast(static_cast<float>(longest)) : 1;
      const int of_warp = (b + kThreads - 1) / kThreads * 32, last = min(b, (warp + 1) * of_warp);
      auto each_own = [&](auto what) {  // its class, and the lanes that have one of the same
#pragma unroll 1
        for (int at = warp * of_warp; at < last; at += 32) {
          const int r = at + lane;
          int its = kClasses;  // none
          if (r < last && passes_of(r) > 0)
            its = min(static_cast<int>(static_cast<float>(longest - blocks_of(r)) * classes), kClasses - 1);
          what(r, its, __match_any_sync(~0u, its));
          __syncwarp();
        }
      };
      in_class[warp][lane] = 0;
      __syncwarp();
      each_own([&](int, int its, unsigned with_it) {
        if (lane == __ffs(with_it) - 1) in_class[warp][its] += __popc(with_it);
      });
      __syncthreads();
      int before = 0, of_class = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        if (i == warp) before = of_class;
        of_class += in_class[i][lane];
      }
      place[warp][lane] = sum_upto(of_class, lane) - of_class + before;
      __syncwarp();
      each_own([&](int r, int its, unsigned with_it) {
        const int at = place[warp][its];
        if (its < kClasses) order[at + __popc(with_it & ((1u << lane) - 1))] = static_cast<unsigned short>(r);
        __syncwarp();
        if (lane == __ffs(with_it) - 1) place[warp][its] = at + __popc(with_it);
      });
      __syncthreads();
    };
    const bool uncut = piece == 0 && !split && all > groups;  // with fewer passes `pieces` has it
    bool whole = false, dealt = false;
    int most_dealt = 0;  // of a group
    // Few are dealt, of which each is short and some are shorter, where requests have as many passes each, or one, and
    // cuts cost something.
    const bool suits = same || most_tiles <= (shared_out ? kSides : side);
    if (!alike && suits && uncut && all <= 6 * groups && total < all * (longest + overhead) &&
        longest + overhead <= cost_of_line && 1.05f * range < cost_of_line) {
      sort();
      int load = 0;
#pragma unroll 1
      for (int round = 0; thread < groups && round < rounds; ++round) {
        const int at = dealt_to(thread, round);
        if (at < all) load += blocks_of(request_dealt(at)) + overhead;
      }
      load = __reduce_max_sync(~0u, load);
      if (lane == 0) counts[0][warp] = load;
      __syncthreads();
      most_dealt = __reduce_max_sync(~0u, counts[0][lane % kWarps]);
      dealt = most_dealt <= cost_of_line;
    }
    if (piece == 0 && !(dealt && most_dealt <= 1.1f * range)) {
      const int g = thread;
      const Line here = line_at(g);
      if (g <= groups) cuts[g] = here.cut, whole_cuts[g] = here.nearest, whole_starts[g] = here.nearest_start;
      __syncthreads();
      if (uncut) {
        const int load = g < groups ? whole_starts[g + 1] - here.nearest_start : 0;
        whole = !__syncthreads_or(load > (dealt ? static_cast<float>(most_dealt) : cost_of_line));
        dealt &= !whole;
      }
    }

    // Each thread block writes the items of other workers, since these lie apart: of a store a multiprocessor does one
    // lane after the other. Several lanes write those of a worker, by turns; all of a warp stay in step.
    const int block = static_cast<int>(blockIdx.x), writers = shared_out ? kWriters : kPlanRequestsBlocks,
              writer = shared_out ? block / kSides : block;
    const int log_lanes = !shared_out ? 5 : side * groups > kWriters * kThreads / 8 ? 2 : 3;
    const int lanes = 1 << log_lanes, own_lane = lane & (lanes - 1);
#pragma unroll 1
    for (int at = thread; ((at - lane) >> log_lanes) * writers + writer < side * groups; at += kThreads) {
      // From the last group to the first: who takes up a part stands behind who gives it.
      const int own_worker = (at >> log_lanes) * writers + writer, worker = min(own_worker, side * groups - 1);
      const int place = by_side.of(worker), g = groups - 1 - place, m = worker - place * side;
      WorkItem* out = with.items + static_cast<long long>(first_worker + worker) * with.rounds;
      Piece own = {};
      if (piece > 0)
        own = piece_of(g);
      else if (dealt)
        own.to = cut_at(rounds);  // of which each is a pass
      else if (whole)
        own.from = cut_at(whole_cuts[g]), own.to = cut_at(whole_cuts[g + 1]);
      else
        own.from = cuts[g], own.to = cuts[g + 1];
      const bool writes = own_worker == worker;
      const int end_pass = own.to.pass, end_block = own.to.block;
#pragma unroll 1
      for (int v = own.from.pass + own_lane;; v += lanes) {
        const int begin = v == own.from.pass ? own.from.block : 0;
        const int at_dealt = dealt ? dealt_to(g, v) : 0;
        const bool inside =
            writes && (v < end_pass || (v == end_pass && end_block > begin)) && (!dealt || at_dealt < all);
        if (!__ballot_sync(~0u, inside)) break;
        int request = 0, row_tile = 0, blocks = 0, items = 0;
        if (inside) {
          request = piece > 0 ? own.request : dealt ? request_dealt(at_dealt) : request_of_pass(v);
          const int pass = dealt ? pass_dealt(at_dealt) : v - first_pass_of(request);  // of the request
          row_tile = pass * side + m;
          blocks = blocks_of(request);
        }
        const int end = v == end_pass ? end_block : blocks;
        if (inside && row_tile < tiles_of[request]) items = split ? (end - begin + split - 1) / max(split, 1) : 1;
        WorkItem* to_own = out;
        if constexpr (split) {
          const int upto = sum_upto(items, own_lane);
          to_own += upto - items;
          out += __shfl_sync(~0u, upto, lane | (lanes - 1));
        } else {
          const unsigned those = __ballot_sync(~0u, items > 0) >> (lane - own_lane) & ~0u >> (32 - lanes);
          to_own += __popc(those & ((1u << own_lane) - 1));
          out += __popc(those);
        }
        if (items == 0) continue;
        const int tokens = tokens_of[request];
        const int query = queries_before(request), first_row = query * with.heads;
        const int queries = equal_queries ? with.queries : queries_between(query, query_start[request + 1]);
        if (split) {
          const int parts = parts_of_split(blocks),
                    of_request = alike ? request * most_tiles * parts : first_part[request];
          const int first_slot = of_request + row_tile * parts;
          for (int at = begin; at < end; at += split) {
            const int part = at / split, slot = parts ? first_slot + part : -1;
            if (parts) with.merges[slot] = {};
            *to_own++ = {request,
                         row_tile,
                         at,
                         min(at + split, end),
                         tokens,
                         slot,
                         first_row,
                         queries,
                         parts ? part : 0,
                         max(parts, 1),
                         whole_of(request)};
          }
        } else {
          int slot = -1, part = 0, parts = 1, join = kJoinsNone;
          if (begin > 0 || end < blocks) {
            if (begin > 0) part = own.from.part;
            parts = begin > 0 ? own.from.parts : own.to.parts;
            if (with.joins && parts == 2 && piece == 0) {
              const Cut of_gives = cuts[g + 2 - part];  // the end of its list
              if (of_gives.pass > v + (of_gives.block == 0)) join = part == 0 ? kTakesUp : kGives;
            }
            // Parts have consecutive slots. There are two at least, and the next pass that is cut has its first part
            // where this one has its last, or later.
            slot = 2 * (first_worker + m * groups + g) - part;
            with.merges[slot] = {};
          }
          *to_own = {request, row_tile,          begin, end, tokens, slot, first_row, queries, part,
                     parts,   whole_of(request), join};
        }
      }
      if (writes && own_lane == 0) *out = {};
    }
  };
  const bool falls = wrong & kFalls;  // then nothing is divided, among no groups
  if (most_tiles <= least_tiles && !equal_queries && !falls) sides = sides_for(most_tiles);
  if (all_alike) return divide(Requests<Known::all>());

  // Who attends what: requests of as many row tiles each are divided among all workers at once. Of different ones
  // either one side serves all, or those of every side have workers of their own, and thread blocks.
  if (most_tiles > least_tiles && !falls) {
    // Of a worker that is busy for so many blocks while all groups read so many. Reads delay the products beside them:
    // by 0.37 of the time that they take themselves, as measured (docs/log/engine.md).
    auto cost_of = [&](float busy, int blocks) {
      const float reads = static_cast<float>(blocks) * with.traffic;
      return max(busy + 0.37f * reads, reads);
    };
    constexpr float kNever = 3e38f;
    // A warp counts for a side that all requests have, and for one that is some requests' own.
    static_assert(kWarps >= kTried);
    if (warp < kTried) {
      int side = warp == kSides ? least_tiles : warp > kSides ? most_tiles : 1 << warp;
      if (warp == kSides - 1) {  // what nearly all have, two of these three have most often; padding is behind them
        const int with_queries = sum_of.all[1];
        const int one = tiles_of[0], other = tiles_of[with_queries / 4], third = tiles_of[with_queries / 2];
        const int common = max(min(one, other), min(max(one, other), third));
        if (common <= 64) side = side_for(common, workers);
      }
      const Quotient by_tried(min(side, workers));
      int work = 0, blocks = 0, own_work = 0, own_blocks = 0;
#pragma unroll 4
      for (int r = lane; r < b; r += 32) {
        const int tiles = tiles_of[r], passes = by_tried.up(tiles), own_passes = passes_of_own_side(tiles, warp + 1);
        blocks += passes * blocks_of(r);
        work += passes * (blocks_of(r) + overhead);
        own_blocks += own_passes * blocks_of(r);
        own_work += own_passes * (blocks_of(r) + overhead);
      }
      blocks = __reduce_add_sync(~0u, blocks);
      work = __reduce_add_sync(~0u, work);
      own_blocks = __reduce_add_sync(~0u, own_blocks);
      own_work = __reduce_add_sync(~0u, own_work);
      if (lane == 0) {
        const float busy = __fdividef(static_cast<float>(work), static_cast<float>(by_tried.of(workers)));
        cost_of_side[warp] = cost_of(busy, blocks);
        tried_side[warp] = by_tried.by;
        if (warp < kSides) work_of_side[warp] = own_work, blocks_of_side[warp] = own_blocks;
      }
    }
    __syncthreads();
    if (warp == 0) {
      // Of sides with workers of their own a lane has one, and groups for it by the shortest time, of one that each
      // lane tries, in which the workers do all the work.
      const int own = lane + 1, work = lane < kSides ? work_of_side[lane] : 0;
      const float all = static_cast<float>(__reduce_add_sync(~0u, work * own));
      const float by_time = __fdividef(static_cast<float>(workers), all * (1 + static_cast<float>(lane) / 128));
      auto groups_for = [&](int work, float by) { return static_cast<int>(ceilf(static_cast<float>(work) * by)); };
      int busy = 0;
#pragma unroll
      for (int i = 0; i < kSides; ++i) busy += groups_for(work_of_side[i], by_time) * (i + 1);
      const unsigned enough = __ballot_sync(~0u, busy <= workers);
      const int found = enough ? __ffs(enough) - 1 : 0;
      int count = groups_for(work, __shfl_sync(~0u, by_time, found)), left = workers - __shfl_sync(~0u, busy, found);
      // Workers left over go where the work of a group is most.
      auto work_of_group = [&] {
        return count > 0 ? __fdividef(static_cast<float>(work), static_cast<float>(count)) : 0.0f;
      };
#pragma unroll 1
      while (left > 0) {
        const float of_group = own <= left ? work_of_group() : 0.0f;
        const float most = __int_as_float(__reduce_max_sync(~0u, __float_as_int(of_group)));
        if (most == 0) break;
        const int winner = __ffs(__ballot_sync(~0u, of_group == most)) - 1;
        count += lane == winner;
        left -= winner + 1;
      }
      const int blocks = __reduce_add_sync(~0u, lane < kSides ? blocks_of_side[lane] : 0);
      const int busiest = __reduce_max_sync(~0u, static_cast<int>(ceilf(work_of_group())));
      // Groups of many workers come first: thread blocks start one after the other (start.cuh).
      const int all_used = __reduce_add_sync(~0u, count * own);
      const int used_up_to = sum_upto<kSides>(count * own, lane);
      if (lane == static_cast<int>(blockIdx.x) % kSides) own_sides = {own, count, all_used - used_up_to, all_used};
      if (lane == 0) cost_of_own_sides = left >= 0 ? cost_of(static_cast<float>(busiest), blocks) : kNever;
    } else if (warp == 1) {
      // Or one side for all.
      const float cost = cost_of_side[min(lane, kTried - 1)];
      const float least = __int_as_float(__reduce_min_sync(~0u, __float_as_int(cost)));  // none is negative
      const int side = __reduce_max_sync(~0u, cost <= 1.04f * least ? tried_side[min(lane, kTried - 1)] : 1);
      if (lane == 0) one_side = {side, Quotient(side).of(workers), 0, 0}, cost_of_one_side = least;
    } else {
      const int r = min(adder, b - 1);
      const int passes = adder < b ? passes_of_own_side(tiles_of[r], static_cast<int>(blockIdx.x) % kSides + 1) : 0;
      of_side = sums_in_warp<2>({passes, passes * (blocks_of(r) + overhead)}, side_sums);
    }
    if (warp < 2 && lane < 2) side_sums[lane][warp] = 0;
    __syncthreads();
    // Sides with workers of their own have some more parts, and ends that are apart.
    const Chosen chosen = cost_of_own_sides + 0.25f < cost_of_one_side ? own_sides : one_side;
    sides.side = chosen.side;
    sides.groups = chosen.groups;
    first_worker = chosen.first_worker;
    used = chosen.used;
    return divide(Requests<Known::nothing>());
  }
  divide(Requests<Known::passes>());
}

}  // namespace hypermla::cute
