// Divides requests of any lengths and numbers of queries among the workers of the latent kernel.
//
// Workers form groups of `side` that walk the same tokens side by side, each with a row tile of its own; a request of
// more row tiles is attended in passes. Every group gets a range of the token blocks of all passes, laid end to end.
// There are three divisions, and the cheapest is taken:
//
//   pieces   each pass in equal pieces, one piece a group: where there are at least as many groups as passes; fewer
//            pieces than groups, or only whole passes, where merging them costs more than it gains
//   line     `overhead` in front of each pass, and the whole cut into equal ranges; a cut near an end of a pass moves
//            there, so that no piece is shorter than what an item costs
//   whole    the cuts of `line` moved to the nearest ends of passes: nothing is cut, and nothing has to be merged
//
// All layers of a step wait for it, and it runs once: what counts is how long its one chain of instructions is. So
// every thread block goes through it with few warps, and writes the lists of some of the workers. Requests that are all
// alike in row tiles and token blocks, which is common, are divided by formulas, without sums and searches over the
// requests, by code of their own. The lists are the same.
//
// With problem.split, requests are cut at multiples of it and nowhere else, and every piece is an item of its own.
//
// grid = kSides * kWriters. A request without queries has no items; one without tokens has a block, all masked.
// Lengths and numbers of queries beyond the arguments' limits are cut to them, and reported. With problem.shards a
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

  __device__ __forceinline__ explicit Quotient(int by) : by(by), reciprocal(__fdividef(1.0f, static_cast<float>(by))) {}
  __device__ __forceinline__ int of(int x) const {
    const int near = static_cast<int>(static_cast<float>(x) * reciprocal), rest = x - near * by;
    return near + (rest >= by) - (rest < 0);
  }
  __device__ __forceinline__ int up(int x) const { return of(x + by - 1); }
};

// A set of boundaries between groups.
struct BoundarySet {
  static constexpr int kWords = kMaxWorkers / 32 + 1;
  unsigned words[kWords];

  __device__ bool has(int g) const { return words[g / 32] >> g % 32 & 1; }
  __device__ int count_below(int g) const {
    int count = __popc(words[g / 32] & ((1u << g % 32) - 1));
    for (int w = 0; w < g / 32; ++w) count += __popc(words[w]);
    return count;
  }
  // The last boundary of the set at or before g, which there must be.
  __device__ int last_to(int g) const {
    int w = g / 32;
    unsigned left = words[w] & ((2u << g % 32) - 1);
    while (!left) left = words[--w];
    return w * 32 + 31 - __clz(left);
  }
  // The first boundary from g on that is not in the set.
  __device__ int first_without(int g) const {
    unsigned without = ~words[g / 32] >> g % 32;
    if (without) return g + __ffs(without) - 1;
    for (int w = g / 32 + 1; w < kWords; ++w)
      if (~words[w]) return w * 32 + __ffs(~words[w]) - 1;
    return kWords * 32;
  }
};

// The sums of the values of the threads before this one, and of all. `of_warps`: one for each warp.
struct SumBefore {
  int before, all;
};
template <int threads>
__device__ __forceinline__ SumBefore sum_before(int own, int* of_warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += below;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  const int of_warp = lane < threads / 32 ? of_warps[lane] : 0;
  return {sum - own + __reduce_add_sync(~0u, lane < warp ? of_warp : 0), __reduce_add_sync(~0u, of_warp)};
}

// The last of the `count` ranges that begins at or before `at`, of those that begin at begins[0], begins[1], ... Eight
// ways at a time: what counts is how often a thread waits for shared memory.
__device__ __forceinline__ int range_of(const int* begins, int count, int at) {
  static_assert(kMaxPlannedRequests <= 8 * 512);
  int low = 0;
#pragma unroll 1
  for (int step = count > 512 ? 512 : count > 64 ? 64 : 8; step > 0; step /= 8) {
    int ways = 0;
#pragma unroll
    for (int i = 1; i < 8; ++i) {
      const int tried = low + i * step;
      ways += tried < count && begins[tried] <= at;
    }
    low += ways * step;
  }
  return low;
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

template <bool all_alike>
struct Requests {  // in row tiles and token blocks
  static constexpr bool alike = all_alike;
};

template <PlanRequestsProblem problem, PlanRequestsTiling tiling>
__global__ void __launch_bounds__(tiling.threads, 1) plan_requests(const __grid_constant__ PlanRequestsArguments with) {
  constexpr int kThreads = tiling.threads, kWarps = kThreads / 32, split = problem.split;
  static_assert(kThreads >= 32 * BoundarySet::kWords && kThreads > kMaxWorkers && kWarps <= 32);
  constexpr int kSums = kMaxPlannedRequests + 1;
  __shared__ int tokens_of[kMaxPlannedRequests];
  __shared__ unsigned short tiles_of[kMaxPlannedRequests];
  __shared__ int query_start[kSums];  // where queries differ
  // Sums over the requests before one: `overhead` and blocks of all passes; passes; pieces.
  __shared__ int start[kSums], first_pass[kSums], first_part[kSums];
  __shared__ int extremes[5][kWarps], sums[kWarps], other_sums[kWarps];
  // Where a group begins: the pass among all, and the token block in it.
  __shared__ int cut_pass[kMaxWorkers + 1], cut_block[kMaxWorkers + 1];
  __shared__ BoundarySet starts_run, continues_run;  // boundaries that cut a pass first, and again
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
  enum { kMostTiles, kLessTiles, kMostBlocks, kLessBlocks, kFlags };  // the least as the most of the negative
  constexpr int kNone = -0x7fffffff, kNoTiles = 4;                    // a flag beside those of PlanStatus
  struct Size {
    int tokens, blocks, tiles, flags;
  };
  auto size_of = [&](int tokens_said, int before, int behind) {
    int queries = with.queries, flags = 0;
    if (!equal_queries) {
      queries = queries_between(before, behind);
      if (queries != behind - before) flags |= kWrongQueries;
    }
    int tokens = min(max(tokens_said, 0), with.max_tokens);
    if (tokens != tokens_said) flags |= kWrongTokens;
    if constexpr (problem.shards) tokens = with.shards.count(tokens);
    const int tiles = tiles_for(queries);
    if (tiles == 0) flags |= kNoTiles;
    return Size{tokens, max(1, (tokens + 63) >> 6), tiles, flags};
  };
  const Size first_size = size_of(first_tokens, first_before, first_behind);
  int most[5] = {0, kNone, 0, kNone, 0};
  bool differs = b == 0;  // from the first request, or something is to be reported
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
    most[kFlags] |= size.flags;
    most[kMostTiles] = max(most[kMostTiles], size.tiles);
    if (size.tiles > 0) {
      most[kLessTiles] = max(most[kLessTiles], -size.tiles);
      most[kMostBlocks] = max(most[kMostBlocks], size.blocks);
      most[kLessBlocks] = max(most[kLessBlocks], -size.blocks);
    }
  }
  if (__syncthreads_or(differs)) {
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      most[i] = i == kFlags ? __reduce_or_sync(~0u, most[i]) : __reduce_max_sync(~0u, most[i]);
      if (lane == 0) extremes[i][warp] = most[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      const int of_warp = extremes[i][lane % kWarps];
      most[i] = i == kFlags ? __reduce_or_sync(~0u, of_warp) : __reduce_max_sync(~0u, of_warp);
    }
  } else {
    most[kMostTiles] = first_size.tiles;
    most[kLessTiles] = -first_size.tiles;
    most[kMostBlocks] = first_size.blocks;
    most[kLessBlocks] = -first_size.blocks;
    most[kFlags] = 0;
  }
  if (blockIdx.x == 0 && thread == 0) *with.status = most[kFlags] & ~kNoTiles;
  const int least_tiles = -most[kLessTiles], most_tiles = most[kMostTiles], longest = most[kMostBlocks];
  int first_worker = 0, used = 0;
  bool shared_out = false;

  // The rest, for requests that are all alike in row tiles and token blocks, whose code needs no sums and no searches,
  // or for any.
  auto divide = [&](auto of_what) {
    constexpr bool alike = of_what.alike;
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
    const bool equal_tiles = alike || (most_tiles == least_tiles && !(most[kFlags] & kNoTiles));
    auto passes_of = [&](int request) {
      if (equal_tiles) return equal_passes;
      const int tiles = tiles_of[request];
      return shared_out ? passes_of_own_side(tiles, side) : by_side.up(tiles);
    };

    // Writes to before[0 .. b] the sums of value(request) over the requests before; returns the last.
    const int each = (b + kThreads - 1) / kThreads, first = min(b, thread * each), last = min(b, first + each);
    auto write_sums = [&](int* before, int* of_warps, auto value) {
      int own = 0;
#pragma unroll 1
      for (int r = first; r < last; ++r) own += value(r);
      const SumBefore sum = sum_before<kThreads>(own, of_warps);
      int at = sum.before;
#pragma unroll 1
      for (int r = first; r < last; ++r) {
        before[r] = at;
        if (each > 1) at += value(r);
      }
      if (thread == kThreads - 1) before[b] = sum.all;
      return sum.all;
    };
    int all = b * equal_passes, total;  // passes; their blocks, and `overhead` of each
    if (alike) {
      total = all * (longest + overhead);
    } else {
      if (!equal_tiles) all = write_sums(first_pass, other_sums, passes_of);
      total = write_sums(start, sums, [&](int r) { return passes_of(r) * (blocks_of(r) + overhead); });
      if constexpr (split) {
        __syncthreads();
        write_sums(first_part, sums, [&](int r) { return tiles_of[r] * parts_of_split(blocks_of(r)); });
      }
      __syncthreads();
    }
    const Quotient by_passes(max(equal_passes, 1)), by_groups(groups);
    auto first_pass_of = [&](int request) { return equal_tiles ? request * equal_passes : first_pass[request]; };
    auto request_of_pass = [&](int v) { return equal_tiles ? by_passes.of(v) : range_of(first_pass, b, v); };

    const unsigned even = static_cast<unsigned>(total + groups - 1) / static_cast<unsigned>(groups);
    const int range = max(static_cast<int>(even), overhead + 1);

    // The division `pieces`: the shortest length that makes no more pieces than groups, found by a search in which
    // every warp tries another length. But none that is shorter than the cheapest: the step takes the length of a
    // piece, and `part_cost` for each part. The sum is least where that length is the square root of part_cost times
    // the blocks of all row tiles. Rounded up from a fraction of 0.8 on: the sum is flat there, and parts cost less the
    // fewer a tile has.
    int piece = 0, pieces = 0, pieces_of_longest = 0;
    if (!split && all > 0 && all <= groups) {
      const float cost_of_line = range + overhead + with.merge_cost + with.part_cost * (groups + all) * side;
      // Pieces that were counted to cost as much as whole passes, 10 blocks, took 2 less.
      const float cost_uncut = longest + overhead, best_other = min(1.1f * cost_uncut, cost_of_line);
      float cost = best_other + 1;
      const int sum = total - overhead * all;
      const int cheapest =
          min(longest, static_cast<int>(sqrtf(with.part_cost * static_cast<float>(side * sum)) + 0.2f));
      if (alike) {
        piece = max(sides.by_groups_of_pass.up(longest), cheapest);
        pieces_of_longest = Quotient(piece).up(longest);
        pieces = all * pieces_of_longest;
      } else {
        // Every warp counts over all requests, again and again: of the first ones a lane keeps its own.
        constexpr int kKept = 4;
        int kept_passes[kKept], kept_blocks[kKept];
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
          const int r = min(lane + 32 * i, b - 1);
          kept_passes[i] = lane + 32 * i < b ? passes_of(r) : 0;
          kept_blocks[i] = blocks_of(r);
        }
        auto pieces_of = [&](int length) {
          const Quotient by_length(length);
          int count = 0;
#pragma unroll
          for (int i = 0; i < kKept; ++i) count += kept_passes[i] * by_length.up(kept_blocks[i]);
#pragma unroll 2
          for (int r = lane + 32 * kKept; r < b; r += 32) count += passes_of(r) * by_length.up(blocks_of(r));
          return static_cast<int>(__reduce_add_sync(~0u, count));
        };
        int low = max(max(1, by_groups.up(sum)), cheapest), high = longest;
        if (all < groups) high = max(low, min(high, Quotient(groups - all).of(sum + groups - all - 1)));
        // None that costs more than the others, even if it made only one piece more than there are passes.
        high = min(high, static_cast<int>(best_other - overhead - with.merge_cost - with.part_cost * (all + 1) * side));
        const bool some = low <= high && pieces_of(high) <= groups;
        if (!some) low = high = 0;
        for (int turn = 0; low < high; ++turn) {
          int* fits = turn % 2 ? other_sums : sums;
          const int tried = low + (high - low) * warp / kWarps;
          const bool fit = pieces_of(tried) <= groups;
          if (lane == 0) fits[warp] = fit;
          __syncthreads();
          const unsigned those = __ballot_sync(~0u, lane < kWarps && fits[lane % kWarps]);
          const int found = those ? __ffs(those) - 1 : kWarps, span = high - low;
          if (found < kWarps) high = low + span * found / kWarps;
          if (found > 0) low = low + span * (found - 1) / kWarps + 1;
        }
        piece = high;
        if (some) pieces = pieces_of(piece);
      }
      if (piece > 0) cost = piece + overhead + with.merge_cost + with.part_cost * pieces * side;
      if (cost > best_other) {
        piece = cost_uncut > cost_of_line ? 0 : longest;
        pieces = all;
        pieces_of_longest = 1;
      }
    }

    struct Cut {
      int pass, block;
    };
    const Quotient by_piece(max(piece, 1));
    auto piece_at = [&](int g) {
      int of = pieces_of_longest, inside = g, blocks = longest, before = 0;
      if (!alike) {
        const int request = range_of(first_part, b, g);
        blocks = blocks_of(request);
        of = by_piece.up(blocks);
        inside = g - first_part[request];
        before = first_pass_of(request);
      }
      const Quotient by_pieces(of);
      const int pass = by_pieces.of(inside);
      const int block = by_pieces.of((inside - pass * of) * blocks);
      return g < pieces ? Cut{before + pass, block} : Cut{all, 0};
    };
    struct Line {
      Cut cut;
      int nearest, nearest_start;  // the end of a pass, and where on the line it is
    };
    auto line_at = [&](int g) {
      const int at = range * min(g, groups);
      if (g > groups || at >= total) return Line{{all, 0}, all, total};
      int blocks = longest, before = 0, start_before = 0;
      if (!alike) {
        const int request = range_of(start, b, at);
        blocks = blocks_of(request);
        before = first_pass_of(request);
        start_before = start[request];
      }
      const int weight = blocks + overhead, pass = Quotient(weight).of(at - start_before);
      const int inside = at - start_before - pass * weight, later = inside > weight / 2;
      int v = before + pass, block = max(0, inside - overhead);
      const int nearest = v + later;
      if (split) {
        block = (block + split / 2) / split * split;
        if (block >= blocks) ++v, block = 0;
      } else if (block < overhead) {
        block = 0;
      } else if (blocks - block < overhead) {
        ++v, block = 0;
      }
      return Line{{v, block}, nearest, start_before + (pass + later) * weight};
    };

    bool cuts = !split;  // some passes may be cut, at boundaries whose parts are still to be counted
    if (piece > 0 && alike) {
      cuts = false;
    } else if (piece > 0) {
      __syncthreads();  // the search has read the sums
      pieces = write_sums(first_part, sums, [&](int r) { return passes_of(r) * by_piece.up(blocks_of(r)); });
      __syncthreads();
      for (int g = thread; g <= groups; g += kThreads) {
        const Cut cut = piece_at(g);
        cut_pass[g] = cut.pass;
        cut_block[g] = cut.block;
      }
    } else {
      const int g = thread;
      const Line here = line_at(g);
      Cut cut = here.cut;
      if (!split && all > groups) {  // the division `whole`; with fewer passes `pieces` has it
        int load = 0;
        if constexpr (alike) {
          if (g < groups) load = line_at(g + 1).nearest_start - here.nearest_start;
        } else {
          __shared__ int ends[kMaxWorkers + 1];
          if (g <= groups) ends[g] = here.nearest_start;
          __syncthreads();
          if (g < groups) load = ends[g + 1] - here.nearest_start;
        }
        const float cost_of_line =
            range + overhead + with.merge_cost + with.part_cost * (groups + min(groups, all)) * side;
        if (!__syncthreads_or(load > cost_of_line)) {
          cut = {here.nearest, 0};
          cuts = false;
        }
      }
      if (g <= groups) cut_pass[g] = cut.pass, cut_block[g] = cut.block;
    }
    const bool by_formula = alike && piece > 0;
    if (!by_formula) __syncthreads();
    if (cuts) {
      if (warp < BoundarySet::kWords) {
        const bool cut = thread <= groups && cut_block[thread] > 0;  // never boundary 0
        const bool again = cut && cut_pass[thread - 1] == cut_pass[thread] && cut_block[thread - 1] > 0;
        const unsigned begun = __ballot_sync(~0u, cut && !again), next = __ballot_sync(~0u, again);
        if (lane == 0) starts_run.words[warp] = begun, continues_run.words[warp] = next;
      }
      __syncthreads();
    }

    // Each thread block writes the items of other workers, since these lie apart: of a store a multiprocessor does one
    // lane after the other. Several lanes write those of a worker, by turns; all of a warp stay in step.
    constexpr int kLanes = 8;
    const int block = static_cast<int>(blockIdx.x), writers = shared_out ? kWriters : kSides * kWriters,
              writer = shared_out ? block / kSides : block;
#pragma unroll 1
    for (int at = thread; (at - lane) / kLanes * writers + writer < side * groups; at += kThreads) {
      // From the last group to the first: who takes up a part stands behind who gives it.
      const int own_worker = at / kLanes * writers + writer, worker = min(own_worker, side * groups - 1);
      const int place = by_side.of(worker), g = groups - 1 - place, m = worker - place * side;
      WorkItem* out = with.items + static_cast<long long>(first_worker + worker) * with.rounds;
      Cut from, to;
      if (by_formula)
        from = piece_at(g), to = piece_at(g + 1);
      else
        from = {cut_pass[g], cut_block[g]}, to = {cut_pass[g + 1], cut_block[g + 1]};
      const bool writes = own_worker == worker;
      const int end_pass = to.pass, end_block = to.block;
#pragma unroll 1
      for (int v = from.pass + at % kLanes;; v += kLanes) {
        const int begin = v == from.pass ? from.block : 0;
        const bool inside = writes && (v < end_pass || (v == end_pass && end_block > begin));
        if (!__ballot_sync(~0u, inside)) break;
        int request = 0, row_tile = 0, blocks = 0, items = 0;
        if (inside) {
          request = request_of_pass(v);
          row_tile = (v - first_pass_of(request)) * side + m;
          blocks = blocks_of(request);
        }
        const int end = v == end_pass ? end_block : blocks;
        if (inside && row_tile < tiles_of[request]) items = split ? (end - begin + split - 1) / max(split, 1) : 1;
        WorkItem* to_own = out;
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          const int of_lane = __shfl_sync(~0u, items, lane / kLanes * kLanes + i);
          if (i < at % kLanes) to_own += of_lane;
          out += of_lane;
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
            // Runs of boundaries that cut the same pass are numbered; its parts have consecutive slots.
            int runs = v;  // before this one
            if (cuts) {
              const int first = begin > 0 ? starts_run.last_to(g) : g + 1;
              part = g + 1 - first;
              parts = continues_run.first_without(first + 1) - first + 1;
              runs = starts_run.count_below(first);
              const int of_gives = g + 2 - part;  // the end of its list
              if (with.joins && parts == 2 && cut_pass[of_gives] > v + (cut_block[of_gives] == 0))
                join = part == 0 ? kTakesUp : kGives;
            } else {  // pieces of passes that are alike
              parts = pieces_of_longest;
              part = g - v * parts;
            }
            slot = 2 * first_worker + m * 2 * groups + g + runs;
            with.merges[slot] = {};
          }
          *to_own = {request, row_tile,          begin, end, tokens, slot, first_row, queries, part,
                     parts,   whole_of(request), join};
        }
      }
      if (writes && at % kLanes == 0) *out = {};
    }
  };
  if (most_tiles <= least_tiles && !equal_queries) sides = sides_for(most_tiles);
  if (most_tiles == least_tiles && longest == -most[kLessBlocks] && !(most[kFlags] & kNoTiles) &&
      static_cast<long long>(b) * most_tiles < 1 << 20)
    return divide(Requests<true>());

  // Who attends what: requests of as many row tiles each are divided among all workers at once. Of different ones
  // either one side serves all, or those of every side have workers of their own, and thread blocks.
  if (most_tiles > least_tiles) {
    constexpr int kTried = kSides + 2;  // sides for all: powers of two, the least and the most tiles
    __shared__ float cost_of_side[kTried];
    __shared__ int work_of_side[kSides], blocks_of_side[kSides];
    __shared__ struct { int side, groups, first_worker, used; } chosen;
    // Of a worker that is busy for so many blocks while all groups read so many. Reads delay the products beside them:
    // by 0.37 of the time that they take themselves, as measured (docs/log/engine.md).
    auto cost_of = [&](float busy, int blocks) {
      const float reads = static_cast<float>(blocks) * with.traffic;
      return max(busy + 0.37f * reads, reads);
    };
    auto side_for_all = [&](int i) {
      return min(i == kSides ? least_tiles : i > kSides ? most_tiles : 1 << i, workers);
    };
    for (int i = warp; i < kTried + kSides; i += kWarps) {
      const int tried = i < kTried ? side_for_all(i) : i - kTried + 1;
      const Quotient by_tried(tried);
      int work = 0, blocks = 0;
#pragma unroll 2
      for (int r = lane; r < b; r += 32) {
        const int tiles = tiles_of[r], passes = i < kTried ? by_tried.up(tiles) : passes_of_own_side(tiles, tried);
        blocks += passes * blocks_of(r);
        work += passes * (blocks_of(r) + overhead);
      }
      work = __reduce_add_sync(~0u, work);
      blocks = __reduce_add_sync(~0u, blocks);
      if (lane == 0 && i < kTried) {
        const float busy = static_cast<float>(work) / static_cast<float>(by_tried.of(workers));
        cost_of_side[i] = cost_of(busy, blocks);
      } else if (lane == 0) {
        work_of_side[tried - 1] = work;
        blocks_of_side[tried - 1] = blocks;
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
#pragma unroll 1
      while (left > 0) {
        const int of_group = count > 0 && own <= left ? work / count : 0;
        const int most = __reduce_max_sync(~0u, of_group);
        if (most == 0) break;
        const int winner = __ffs(__ballot_sync(~0u, of_group == most)) - 1;
        count += lane == winner;
        left -= winner + 1;
      }
      // Or one side for all.
      const int blocks = __reduce_add_sync(~0u, lane < kSides ? blocks_of_side[lane] : 0);
      const int busiest = __reduce_max_sync(~0u, count > 0 ? (work + count - 1) / count : 0);
      const float cost = cost_of_side[min(lane, kTried - 1)];
      const float least = __int_as_float(__reduce_min_sync(~0u, __float_as_int(cost)));  // none is negative
      const int side = __reduce_max_sync(~0u, cost <= 1.04f * least ? side_for_all(min(lane, kTried - 1)) : 1);
      const bool share = left >= 0 && cost_of(static_cast<float>(busiest), blocks) < 0.96f * least;
      // Groups of many workers come first: thread blocks start one after the other (start.cuh).
      int first = 0, all_used = 0;
#pragma unroll
      for (int i = 0; i < kSides; ++i) {
        const int used_by = __shfl_sync(~0u, count * own, i);
        if (i > lane) first += used_by;
        all_used += used_by;
      }
      if (lane == static_cast<int>(blockIdx.x) % kSides) {
        if (share)
          chosen = {own, count, first, all_used};
        else
          chosen = {side, Quotient(side).of(workers), 0, 0};
      }
    }
    __syncthreads();
    sides.side = chosen.side;
    sides.groups = chosen.groups;
    first_worker = chosen.first_worker;
    used = chosen.used;
    shared_out = used > 0;
  }
  divide(Requests<false>());
}

}  // namespace hypermla::cute
