// Divides requests of any lengths and numbers of queries among the workers of the latent kernel.
//
// Workers form groups of `side` that walk the same tokens side by side, each with a row tile of its own; a request of
// more row tiles is attended in passes. Every group gets a range of the token blocks of all passes, laid end to end.
// There are three divisions, and the cheapest is taken:
//
//   pieces   each pass in equal pieces, one piece a group: where there are at least as many groups as passes
//   line     `overhead` in front of each pass, and the whole cut into equal ranges; a cut near an end of a pass moves
//            there, so that no piece is shorter than what an item costs
//   whole    the cuts of `line` moved to the nearest ends of passes: nothing is cut, and nothing has to be merged
//
// With problem.split, requests are cut at multiples of it and nowhere else, and every piece is an item of its own.
//
// grid = kSides, or 1 where all requests have as many queries. A request without queries has no items; one without
// tokens has a block, all masked. Lengths and numbers of queries beyond the arguments' limits are cut to them, and
// reported. With problem.shards a length counts the tokens in all caches, of which those in this one are divided.
#pragma once

#include "hopper/warpgroup.h"
#include "plan_requests.h"
#include "work.h"

namespace hypermla::cute {

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

// The sum of the values of the threads before this one, for each thread of the block. `sums`: one for each warp.
template <int threads>
__device__ __forceinline__ int sum_before(int own, int* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += below;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < threads / 32; ++w) sum += w < warp ? sums[w] : 0;
  return sum - own;
}

// The last of the `count` ranges that begins at or before `at`, of those that begin at begins[0], begins[1], ...
__device__ __forceinline__ int range_of(const int* begins, int count, int at) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (begins[middle] <= at)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// How many workers attend row tiles of a request side by side, for requests of `row_tiles` tiles each: what leaves the
// fewest of them idle. Tiles that walk side by side share the tokens' reads, so few passes are better.
__device__ __forceinline__ int side_for(int row_tiles, int workers) {
  int best = 1;
  float best_use = 0;
  for (int passes = 1; passes <= row_tiles; ++passes) {
    const int side = (row_tiles + passes - 1) / passes;
    if (side > workers) continue;
    if (passes > 1 && side < 8 && best_use > 0) break;
    const float use = static_cast<float>(row_tiles) * (workers / side) / (static_cast<float>(passes) * workers);
    if (use > best_use + 0.04f) {
      best = side;
      best_use = use;
    }
  }
  return best;
}

// The side that suits a request of its own row tiles, up to kSides: few passes, of as many tiles each.
__device__ __forceinline__ int own_side(int tiles) {
  const int passes = max((tiles + kSides - 1) / kSides, 1);
  return (tiles + passes - 1) / passes;
}

template <PlanRequestsProblem problem, PlanRequestsTiling tiling>
__global__ void __launch_bounds__(tiling.threads, 1) plan_requests(const __grid_constant__ PlanRequestsArguments with) {
  constexpr int kThreads = tiling.threads, kWarps = kThreads / 32, split = problem.split;
  static_assert(kThreads >= 32 * BoundarySet::kWords && kThreads > kMaxWorkers);
  constexpr int kSums = kMaxPlannedRequests + 1;
  __shared__ int tokens_of[kMaxPlannedRequests];
  __shared__ unsigned short tiles_of[kMaxPlannedRequests];
  // Sums over the requests before one: `overhead` and blocks of all passes; passes; pieces.
  __shared__ int start[kSums], first_pass[kSums], first_part[kSums];
  __shared__ int sums[kWarps], other_sums[kWarps];
  // Where a group begins: the pass among all, and the token block in it.
  __shared__ int cut_pass[kMaxWorkers + 1], cut_block[kMaxWorkers + 1];
  __shared__ BoundarySet starts_run, continues_run;  // boundaries that cut a pass first, and again
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int b = with.requests, overhead = with.overhead, workers = with.workers;

  auto blocks_of = [&](int request) { return max(1, (tokens_of[request] + 63) / 64); };
  auto parts_of_split = [&](int blocks) { return split && blocks > split ? (blocks + split - 1) / split : 0; };
  auto whole_of = [&](int request) {
    if constexpr (problem.shards)
      return min(max(with.lengths[request], 0), with.max_tokens);
    else
      return 0;
  };
  auto queries_before = [&](int request) {
    return with.query_starts ? with.query_starts[request] : request * with.queries;
  };
  auto queries_of = [&](int request) {
    const int before = queries_before(request),
              queries = min(max(queries_before(request + 1) - before, 0), with.queries);
    return before >= 0 && before <= with.all_queries - queries ? queries : 0;
  };
  const int each = (b + kThreads - 1) / kThreads, first = min(b, thread * each), last = min(b, first + each);

  launch_next();
  wait_for_previous();
  int least_tiles = 0x7fffffff, most_tiles = 0, wrong = 0;
  for (int r = first; r < last; ++r) {
    const int tokens = with.lengths ? with.lengths[r] : with.max_tokens, queries = queries_of(r);
    wrong |= (tokens < 0 || tokens > with.max_tokens ? kWrongTokens : 0) |
             (queries != queries_before(r + 1) - queries_before(r) ? kWrongQueries : 0);
    tokens_of[r] = min(max(tokens, 0), with.max_tokens);
    if constexpr (problem.shards) tokens_of[r] = with.shards.count(tokens_of[r]);
    const int tiles = (queries * with.heads + with.tile_rows - 1) / with.tile_rows;
    tiles_of[r] = static_cast<unsigned short>(tiles);
    if (tiles > 0) least_tiles = min(least_tiles, tiles);
    most_tiles = max(most_tiles, tiles);
  }
  wrong = __reduce_or_sync(~0u, wrong);
  most_tiles = __reduce_max_sync(~0u, most_tiles);
  least_tiles = -__reduce_max_sync(~0u, -least_tiles);
  if (lane == 0) {
    cut_block[warp] = wrong;  // borrowed
    sums[warp] = most_tiles;
    other_sums[warp] = least_tiles;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    wrong |= cut_block[w];
    most_tiles = max(most_tiles, sums[w]);
    least_tiles = min(least_tiles, other_sums[w]);
  }
  if (blockIdx.x == 0 && thread == 0) *with.status = wrong;
  __syncthreads();

  // Who attends what: requests of as many row tiles each are divided among all workers at once, by one thread block. Of
  // different ones either one side serves all, or those of every side have workers of their own, and a thread block.
  int side = 1, groups = 0, first_worker = 0, used = 0;
  bool shared_out = false;
  if (most_tiles <= least_tiles) {
    side = side_for(most_tiles, workers);
  } else {
    constexpr int kTried = kSides + 2;  // sides for all: powers of two, the least and the most tiles
    __shared__ float cost_of_side[kTried];
    __shared__ int work_of_side[kSides], groups_of_side[kSides], blocks_of_side[kSides];
    auto side_for_all = [&](int i) {
      return min(i == kSides ? least_tiles : i > kSides ? most_tiles : 1 << i, workers);
    };
    for (int i = warp; i < kTried + kSides; i += kWarps) {
      const int tried = i < kTried ? side_for_all(i) : i - kTried + 1;
      int work = 0, blocks = 0;
      for (int r = lane; r < b; r += 32) {
        if (i >= kTried && own_side(tiles_of[r]) != tried) continue;
        const int passes = (tiles_of[r] + tried - 1) / tried;
        blocks += passes * blocks_of(r);
        work += passes * (blocks_of(r) + overhead);
      }
      work = __reduce_add_sync(~0u, work);
      blocks = __reduce_add_sync(~0u, blocks);
      if (lane == 0 && i < kTried) {
        const float busy = static_cast<float>(work) / static_cast<float>(workers / tried);
        cost_of_side[i] = max(busy, static_cast<float>(blocks) * with.traffic);
      } else if (lane == 0) {
        work_of_side[tried - 1] = work;
        blocks_of_side[tried - 1] = blocks;
      }
    }
    __syncthreads();
    if (warp == 0) {  // workers in proportion to the work; those left over go where the work of a group is most
      const int own = lane + 1, work = lane < kSides ? work_of_side[lane] : 0;
      float all = 0;
      for (int i = 0; i < kSides; ++i) all += static_cast<float>(work_of_side[i]) * static_cast<float>(i + 1);
      int count = work > 0 ? max(1, static_cast<int>(static_cast<float>(work) / all * static_cast<float>(workers))) : 0;
      int left = workers - __reduce_add_sync(~0u, count * own);
      while (left > 0) {
        const int most = __reduce_max_sync(~0u, count > 0 && own <= left ? work / count : 0);
        if (most == 0) break;
        const int winner = __ffs(__ballot_sync(~0u, count > 0 && own <= left && work / count == most)) - 1;
        count += lane == winner;
        left -= winner + 1;
      }
      if (lane < kSides) groups_of_side[lane] = left >= 0 ? count : 0;
    }
    __syncthreads();
    float least = cost_of_side[0], blocks = 0, longest = 0;
    for (int i = 1; i < kTried; ++i) least = min(least, cost_of_side[i]);
    for (int i = 0; i < kTried; ++i)
      if (cost_of_side[i] <= 1.04f * least) side = max(side, side_for_all(i));
    for (int i = 0; i < kSides; ++i) {
      used += groups_of_side[i] * (i + 1);
      blocks += static_cast<float>(blocks_of_side[i]);
      if (groups_of_side[i] > 0)
        longest = max(longest, static_cast<float>(work_of_side[i]) / static_cast<float>(groups_of_side[i]));
    }
    shared_out = used > 0 && max(longest, blocks * with.traffic) < 0.96f * least;
    if (shared_out) {
      side = blockIdx.x + 1;
      groups = groups_of_side[blockIdx.x];
      for (int i = 0; i < side - 1; ++i) first_worker += groups_of_side[i] * (i + 1);
    }
  }
  if (!shared_out) {
    groups = workers / side;
    used = side * groups;
  }
  if (blockIdx.x == 0)
    for (int worker = used + thread; worker < workers; worker += kThreads)
      with.items[static_cast<long long>(worker) * with.rounds] = {};
  if (groups == 0 || (blockIdx.x > 0 && !shared_out)) return;
  auto passes_of = [&](int request) {
    const int tiles = tiles_of[request];
    return shared_out && own_side(tiles) != side ? 0 : (tiles + side - 1) / side;
  };

  // Writes to before[0 .. b] the sums of value(request) over the requests before.
  auto write_sums = [&](int* before, int* of_warps, auto value) {
    int own = 0;
    for (int r = first; r < last; ++r) own += value(r);
    int sum = sum_before<kThreads>(own, of_warps);
    for (int r = first; r < last; ++r) {
      before[r] = sum;
      sum += value(r);
    }
    if (thread == kThreads - 1) before[b] = sum;
  };
  write_sums(start, sums, [&](int r) { return passes_of(r) * (blocks_of(r) + overhead); });
  write_sums(first_pass, other_sums, passes_of);
  if constexpr (split) {
    __syncthreads();
    write_sums(first_part, other_sums, [&](int r) { return tiles_of[r] * parts_of_split(blocks_of(r)); });
  }
  __syncthreads();

  const int all = first_pass[b];  // passes
  const int total = start[b];
  const int range = max((total + groups - 1) / groups, overhead + 1);

  // The division `pieces`: the shortest length that makes no more pieces than groups, found by a search in which every
  // warp tries another length.
  int piece = 0;
  if (!split && all > 0 && all <= groups) {
    auto pieces_of = [&](int length) {
      int count = 0;
      for (int r = lane; r < b; r += 32) count += passes_of(r) * ((blocks_of(r) + length - 1) / length);
      return static_cast<int>(__reduce_add_sync(~0u, count));
    };
    int longest = 0;
    for (int r = lane; r < b; r += 32) longest = max(longest, tiles_of[r] ? blocks_of(r) : 0);
    longest = __reduce_max_sync(~0u, longest);
    const int sum = total - overhead * all;
    int low = max(1, (sum + groups - 1) / groups), high = longest;
    if (all < groups) high = min(high, (sum + groups - all - 1) / (groups - all));
    for (int turn = 0; low < high; ++turn) {
      int* fits = turn % 2 ? other_sums : sums;
      const int tried = low + (high - low) * warp / kWarps;
      const bool fit = pieces_of(tried) <= groups;
      if (lane == 0) fits[warp] = fit;
      __syncthreads();
      int found = 0;
      while (found < kWarps && !fits[found]) ++found;
      const int span = high - low;
      if (found < kWarps) high = low + span * found / kWarps;
      if (found > 0) low = low + span * (found - 1) / kWarps + 1;
    }
    piece = high;
    const int pieces = pieces_of(piece);
    const float cost = piece + overhead + (pieces > all ? with.merge_cost + with.part_cost * pieces * side : 0.0f);
    const float cost_of_line = range + overhead + with.merge_cost + with.part_cost * (groups + all) * side;
    if (cost > cost_of_line) piece = 0;
  }

  if (piece > 0) {
    __syncthreads();  // the search has read the sums
    write_sums(first_part, sums, [&](int r) { return passes_of(r) * ((blocks_of(r) + piece - 1) / piece); });
    __syncthreads();
    for (int g = thread; g <= groups; g += kThreads) {
      int v = all, block = 0;
      if (g < first_part[b]) {
        const int request = range_of(first_part, b, g), blocks = blocks_of(request), of = (blocks + piece - 1) / piece;
        const int inside = g - first_part[request];
        v = first_pass[request] + inside / of;
        block = inside % of * blocks / of;
      }
      cut_pass[g] = v;
      cut_block[g] = block;
    }
  } else {
    int load = 0, nearest = all, nearest_start = total;
    for (int g = thread; g <= groups; g += kThreads) {
      const long long at = static_cast<long long>(range) * g;
      int v = all, block = 0;
      if (at < total) {
        const int request = range_of(start, b, static_cast<int>(at));
        const int blocks = blocks_of(request), weight = blocks + overhead;
        const int inside = static_cast<int>(at) - start[request];
        v = first_pass[request] + inside / weight;
        const int later = inside % weight > weight / 2;
        nearest = v + later;
        nearest_start = start[request] + (inside / weight + later) * weight;
        block = max(0, inside % weight - overhead);
        if (split) {
          block = (block + split / 2) / split * split;
          if (block >= blocks) ++v, block = 0;
        } else if (block < overhead) {
          block = 0;
        } else if (blocks - block < overhead) {
          ++v, block = 0;
        }
      }
      cut_pass[g] = v;
      cut_block[g] = block;
    }
    if (!split) {  // the division `whole`
      __shared__ int ends[kMaxWorkers + 1];
      if (thread <= groups) ends[thread] = nearest_start;
      __syncthreads();
      if (thread < groups) load = ends[thread + 1] - nearest_start;
      load = __reduce_max_sync(~0u, load);
      if (lane == 0) sums[warp] = load;
      __syncthreads();
#pragma unroll
      for (int w = 0; w < kWarps; ++w) load = max(load, sums[w]);
      const float cost_of_line =
          range + overhead + with.merge_cost + with.part_cost * (groups + min(groups, all)) * side;
      if (load <= cost_of_line && thread <= groups) {
        cut_pass[thread] = nearest;
        cut_block[thread] = 0;
      }
    }
  }
  __syncthreads();
  if (!split) {
    if (warp < BoundarySet::kWords) {
      const bool cuts = thread <= groups && cut_block[thread] > 0;  // never boundary 0
      const bool again = cuts && cut_pass[thread - 1] == cut_pass[thread] && cut_block[thread - 1] > 0;
      const unsigned begun = __ballot_sync(~0u, cuts && !again), next = __ballot_sync(~0u, again);
      if (lane == 0) starts_run.words[warp] = begun, continues_run.words[warp] = next;
    }
    __syncthreads();
  }

  for (int worker = thread; worker < side * groups; worker += kThreads) {
    const int g = worker / side, m = worker % side;
    WorkItem* out = with.items + static_cast<long long>(first_worker + worker) * with.rounds;
    const int end_pass = cut_pass[g + 1], end_block = cut_block[g + 1];
    int v = cut_pass[g], request = v < all ? range_of(first_pass, b, v) : 0;
    for (int begin = cut_block[g]; v < end_pass || (v == end_pass && end_block > begin); ++v, begin = 0) {
      while (v >= first_pass[request + 1]) ++request;
      const int pass = v - first_pass[request], row_tile = pass * side + m;
      const int blocks = blocks_of(request), end = v == end_pass ? end_block : blocks;
      const int tokens = tokens_of[request], first_row = queries_before(request) * with.heads;
      const int queries = queries_of(request);
      if (row_tile >= tiles_of[request]) {
      } else if (split) {
        const int parts = parts_of_split(blocks), first_slot = first_part[request] + row_tile * parts;
        for (int at = begin; at < end; at += split) {
          const int part = at / split, slot = parts ? first_slot + part : -1;
          if (parts) with.merges[slot] = {};
          *out++ = {request,
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
        int slot = -1, part = 0, parts = 1;
        if (begin > 0 || end < blocks) {
          // Runs of boundaries that cut the same pass are numbered; its parts have consecutive slots.
          const int first = begin > 0 ? starts_run.last_to(g) : g + 1;
          part = g + 1 - first;
          parts = continues_run.first_without(first + 1) - first + 1;
          slot = 2 * first_worker + m * 2 * groups + g + starts_run.count_below(first);
          with.merges[slot] = {};
        }
        *out++ = {request, row_tile, begin, end, tokens, slot, first_row, queries, part, parts, whole_of(request)};
      }
    }
    *out = {};
  }
}

}  // namespace hypermla::cute
