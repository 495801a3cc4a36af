// Divides requests of any lengths among the workers of the latent kernel: one thread block.
//
// Workers form groups that walk the same tokens side by side (RequestSchedule). Every group gets a range of the token
// blocks of all requests, laid end to end, pass after pass. There are three divisions, and the cheapest is taken:
//
//   pieces   each request in equal pieces, one piece a group: where there are at least as many groups as requests
//   line     `overhead` in front of each request, and the whole cut into equal ranges; a cut near an end of a request
//            moves there, so that no piece is shorter than what an item costs
//   whole    the cuts of `line` moved to the nearest ends of requests: nothing is cut, and nothing has to be merged
//
// With problem.split, requests are cut at multiples of it and nowhere else, and every piece is an item of its own.
//
// grid = 1. Reads lengths [b], 0 <= length. Writes items [workers, rounds] and combines [combine_items], see work.h;
// combine items without use get 0 slots. Slots: row tile side m has those from m * slots_per_tile on. merge_cost and
// part_cost: what a merge and each of its parts cost, in token blocks.
#pragma once

#include "hopper/warpgroup.h"
#include "plan_requests.h"
#include "work.h"

namespace hypermla::cute {

// A set of boundaries between groups.
struct BoundarySet {
  static constexpr int kWords = kMaxGroups / 32 + 1;
  unsigned words[kWords];

  __device__ bool has(int g) const { return words[g / 32] >> g % 32 & 1; }
  __device__ int count_below(int g) const {
    int count = __popc(words[g / 32] & ((1u << g % 32) - 1));
    for (int w = 0; w < g / 32; ++w) count += __popc(words[w]);
    return count;
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

template <PlanRequestsProblem problem, PlanRequestsTiling tiling>
__global__ void __launch_bounds__(tiling.threads, 1)
    plan_requests(const int* __restrict__ lengths, WorkItem* items, CombineItem* combines, int b, int row_tiles,
                  int side, int passes, int groups, int rounds, int overhead, float merge_cost, float part_cost,
                  int slots_per_tile, int combine_items) {
  constexpr int kThreads = tiling.threads, kWarps = kThreads / 32, split = problem.split;
  static_assert(kThreads >= 32 * BoundarySet::kWords);
  __shared__ int tokens_of[kMaxPlannedRequests];
  __shared__ int start[kMaxPlannedRequests + 1];       // of a request on the line of one pass, `overhead` before each
  __shared__ int first_part[kMaxPlannedRequests + 1];  // of a request among all parts of one pass
  __shared__ int sums[kWarps], other_sums[kWarps];
  // Where a group begins: request * passes + pass, and the token block in it.
  __shared__ int cut_request[kMaxGroups + 1], cut_block[kMaxGroups + 1];
  __shared__ BoundarySet starts_run, continues_run;  // boundaries that cut a request first, and again
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

  auto parts_of_split = [&](int blocks) { return split && blocks > split ? (blocks + split - 1) / split : 0; };
  auto blocks_of = [&](int request) { return start[request + 1] - start[request] - overhead; };

  launch_next();
  wait_for_previous();
  {
    const int each = (b + kThreads - 1) / kThreads, begin = min(b, thread * each), end = min(b, begin + each);
    int own = 0, own_parts = 0;
    for (int r = begin; r < end; ++r) {
      tokens_of[r] = lengths[r];
      const int blocks = max(1, (tokens_of[r] + 63) / 64);
      own += blocks + overhead;
      own_parts += parts_of_split(blocks);
    }
    int sum = sum_before<kThreads>(own, sums);
    int parts = split ? sum_before<kThreads>(own_parts, other_sums) : 0;
    for (int r = begin; r < end; ++r) {
      const int blocks = max(1, (tokens_of[r] + 63) / 64);
      start[r] = sum;
      first_part[r] = parts;
      sum += blocks + overhead;
      parts += parts_of_split(blocks);
    }
    if (end == b && begin < end) start[b] = sum;
  }
  __syncthreads();

  const int all = b * passes;  // requests, pass by pass
  const long long total = static_cast<long long>(start[b]) * passes;
  const long long range = max((total + groups - 1) / groups, static_cast<long long>(overhead) + 1);

  // The division `pieces`: the shortest length that makes no more pieces than groups, found by a search in which every
  // warp tries another length.
  int piece = 0;
  float cost = __int_as_float(0x7f800000);
  if (!split && all <= groups) {
    constexpr int kEach = (kMaxGroups + 31) / 32;
    int blocks[kEach], longest = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      blocks[i] = lane + 32 * i < b ? blocks_of(lane + 32 * i) : 0;
      longest = max(longest, blocks[i]);
    }
    longest = __reduce_max_sync(~0u, longest);
    auto pieces_of = [&](int length) {
      int count = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) count += (blocks[i] + length - 1) / length;
      return static_cast<int>(__reduce_add_sync(~0u, count)) * passes;
    };
    const int sum = (start[b] - overhead * b) * passes;
    int low = max(1, (sum + groups - 1) / groups), high = longest;
    if (all < groups) high = min(high, (sum + groups - all - 1) / (groups - all));
    for (int turn = 0; low < high; ++turn) {
      int* fits = turn % 2 ? other_sums : sums;
      const int tried = low + (high - low) * warp / kWarps;
      const bool fit = pieces_of(tried) <= groups;
      if (lane == 0) fits[warp] = fit;
      __syncthreads();
      int first = 0;
      while (first < kWarps && !fits[first]) ++first;
      const int span = high - low;
      if (first < kWarps) high = low + span * first / kWarps;
      if (first > 0) low = low + span * (first - 1) / kWarps + 1;
    }
    piece = high;
    const int pieces = pieces_of(piece);
    cost = piece + overhead + (pieces > all ? merge_cost + part_cost * pieces * side : 0.0f);
    const float cost_of_line = range + overhead + merge_cost + part_cost * (groups + all) * side;
    if (cost > cost_of_line) piece = 0;
  }

  if (piece > 0) {
    __syncthreads();  // the search has read the sums
    const int parts = thread < b ? (blocks_of(thread) + piece - 1) / piece : 0;
    const int before = sum_before<kThreads>(parts, sums);
    if (thread < b) first_part[thread] = before;
    if (thread == b - 1) first_part[b] = before + parts;
    __syncthreads();
    for (int g = thread; g <= groups; g += kThreads) {
      int v = all, block = 0;
      if (g < first_part[b] * passes) {
        int low = 0, high = b;  // the request of the g-th piece
        while (high - low > 1) {
          const int middle = (low + high) / 2;
          if (first_part[middle] * passes <= g) low = middle; else high = middle;
        }
        const int inside = g - first_part[low] * passes, of = first_part[low + 1] - first_part[low];
        v = low * passes + inside / of;
        block = inside % of * blocks_of(low) / of;
      }
      cut_request[g] = v;
      cut_block[g] = block;
    }
  } else {
    int load = 0, nearest = 0;
    for (int g = thread; g <= groups; g += kThreads) {
      const long long at = range * g;
      int v = all, block = 0;
      nearest = all;
      if (at < total) {
        const int on_line = static_cast<int>(passes == 1 ? at : at / passes);
        int low = 0, high = b;  // the last request that begins at or before it
        while (high - low > 1) {
          const int middle = (low + high) / 2;
          if (start[middle] <= on_line) low = middle; else high = middle;
        }
        const int blocks = blocks_of(low), weight = blocks + overhead;
        const int inside = static_cast<int>(at - static_cast<long long>(start[low]) * passes);
        v = low * passes + inside / weight;
        nearest = v + (inside % weight > weight / 2);
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
      cut_request[g] = v;
      cut_block[g] = block;
    }
    if (!split) {  // the division `whole`
      __shared__ int ends[kMaxGroups + 1];
      static_assert(kThreads > kMaxGroups);
      auto on_line = [&](int v) {
        const int request = v / passes;
        const long long before = static_cast<long long>(start[min(request, b)]) * passes;
        return request < b ? before + static_cast<long long>(v % passes) * (blocks_of(request) + overhead) : before;
      };
      if (thread <= groups) ends[thread] = nearest;
      __syncthreads();
      if (thread < groups)
        load = static_cast<int>(min(on_line(ends[thread + 1]) - on_line(ends[thread]), 0x7fffffffLL));
      load = __reduce_max_sync(~0u, load);
      if (lane == 0) sums[warp] = load;
      __syncthreads();
#pragma unroll
      for (int w = 0; w < kWarps; ++w) load = max(load, sums[w]);
      const float cost_of_line = range + overhead + merge_cost + part_cost * (groups + min(groups, all)) * side;
      if (load <= cost_of_line && thread <= groups) {
        cut_request[thread] = ends[thread];
        cut_block[thread] = 0;
      }
    }
  }
  __syncthreads();
  if (!split) {
    if (warp < BoundarySet::kWords) {
      const bool cuts = thread <= groups && cut_block[thread] > 0;  // never boundary 0
      const bool again = cuts && cut_request[thread - 1] == cut_request[thread] && cut_block[thread - 1] > 0;
      const unsigned first = __ballot_sync(~0u, cuts && !again), next = __ballot_sync(~0u, again);
      if (lane == 0) starts_run.words[warp] = first, continues_run.words[warp] = next;
    }
    __syncthreads();
  }

  for (int worker = thread; worker < side * groups; worker += kThreads) {
    const int g = worker / side, m = worker % side;
    WorkItem* out = items + static_cast<long long>(worker) * rounds;
    const int last = cut_request[g + 1], last_block = cut_block[g + 1];
    int v = cut_request[g], request = v / passes, pass = v % passes;
    for (int begin = cut_block[g]; v < last || (v == last && last_block > begin); ++v, begin = 0) {
      const int row_tile = pass * side + m, blocks = blocks_of(request), end = v == last ? last_block : blocks;
      const int tokens = tokens_of[request];
      if (row_tile >= row_tiles) {
      } else if (split) {
        const int parts = parts_of_split(blocks);
        const int first_slot = m * slots_per_tile + first_part[request] * passes + pass * parts;
        for (int at = begin; at < end; at += split)
          *out++ = {request, row_tile, at, min(at + split, end), tokens, parts ? first_slot + at / split : -1, {}};
        if (begin == 0) combines[v * side + m] = {request, row_tile, first_slot, parts};
      } else {
        int slot = -1;
        if (begin > 0 || end < blocks) {
          // Runs of boundaries that cut the same request are numbered; its parts have consecutive slots.
          const int boundary = begin > 0 ? g : g + 1;
          const int run = starts_run.count_below(boundary) - !starts_run.has(boundary);
          slot = m * slots_per_tile + g + run;
          if (begin == 0) {
            const int parts = continues_run.first_without(boundary + 1) - boundary + 1;
            combines[run * side + m] = {request, row_tile, slot, parts};
          }
        }
        *out++ = {request, row_tile, begin, end, tokens, slot, {}};
      }
      if (++pass == passes) pass = 0, ++request;
    }
    *out = {};
  }
  if (split) {  // requests of one part have written theirs above, with 0 slots; tiles that do not exist have none
    for (int i = thread; i < combine_items; i += kThreads)
      if (i / side % passes * side + i % side >= row_tiles) combines[i] = {};
  } else {
    for (int i = starts_run.count_below(groups) * side + thread; i < combine_items; i += kThreads) combines[i] = {};
    // A cut request has row tiles m < side in every pass but maybe the last.
    for (int worker = thread; worker < side * groups; worker += kThreads) {
      const int g = worker / side, m = worker % side;
      if (starts_run.has(g) && cut_request[g] % passes * side + m >= row_tiles)
        combines[starts_run.count_below(g) * side + m] = {};
    }
  }
}

}  // namespace hypermla::cute
