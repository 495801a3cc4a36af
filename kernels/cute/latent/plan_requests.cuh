// Cuts requests of any lengths evenly over the workers of the latent kernel: one thread block, a few microseconds.
//
// The token blocks of all requests, `overhead` in front of each, are laid end to end and cut into one equal range per
// group of workers (see RequestSchedule). A cut near an end of a request moves there, so that no piece is shorter than
// what an item costs. With problem.split, requests are cut at multiples of it and nowhere else, and every piece is an
// item of its own.
//
// grid = 1. Reads lengths [b], 0 <= length. Writes items [workers, rounds] and combines [combine_items], see work.h;
// combine items without use get 0 slots. Slots: row tile side m has those from m * slots_per_tile on.
#pragma once

#include "hopper/warpgroup.h"
#include "plan_requests.h"
#include "work.h"

namespace hypermla::cute {

template <PlanRequestsProblem problem, PlanRequestsTiling tiling>
__global__ void __launch_bounds__(tiling.threads, 1)
    plan_requests(const int* __restrict__ lengths, WorkItem* items, CombineItem* combines, int b, int row_tiles,
                  int side, int passes, int groups, int rounds, int overhead, int slots_per_tile, int combine_items) {
  constexpr int kThreads = tiling.threads, split = problem.split;
  constexpr int kMaxGroups = 160;
  __shared__ long long start[kMaxPlannedRequests + 1];  // of a request on the line, one pass
  __shared__ int first_part[kMaxPlannedRequests + 1];   // with split: parts of the cut requests before this one
  __shared__ long long warp_sum[kThreads / 32];
  __shared__ int warp_parts[kThreads / 32];
  __shared__ int cut_request[kMaxGroups + 1],
      cut_block[kMaxGroups + 1];  // where a group's range begins; request * passes + pass
  __shared__ int cuts_before[kMaxGroups + 2];                             // requests cut at a boundary before this one
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

  auto blocks_of = [&](int request) { return max(1, (lengths[request] + 63) / 64); };
  auto parts_of = [&](int blocks) { return split && blocks > split ? (blocks + split - 1) / split : 0; };

  launch_next();
  wait_for_previous();
  {  // prefix sums
    const int each = (b + kThreads - 1) / kThreads, begin = min(b, thread * each), end = min(b, begin + each);
    long long own = 0;
    int own_parts = 0;
    for (int r = begin; r < end; ++r) {
      const int blocks = blocks_of(r);
      own += blocks + overhead;
      own_parts += parts_of(blocks) * passes;
    }
    long long sum = own;
    int parts = own_parts;
    for (int step = 1; step < 32; step *= 2) {
      const long long below = __shfl_up_sync(~0u, sum, step);
      const int parts_below = __shfl_up_sync(~0u, parts, step);
      if (lane >= step) {
        sum += below;
        parts += parts_below;
      }
    }
    if (lane == 31) {
      warp_sum[warp] = sum;
      warp_parts[warp] = parts;
    }
    __syncthreads();
    for (int w = 0; w < warp; ++w) {
      sum += warp_sum[w];
      parts += warp_parts[w];
    }
    sum -= own;
    parts -= own_parts;
    for (int r = begin; r < end; ++r) {
      start[r] = sum;
      first_part[r] = parts;
      const int blocks = blocks_of(r);
      sum += blocks + overhead;
      parts += parts_of(blocks) * passes;
    }
    if (end == b && begin < end) {
      start[b] = sum;
      first_part[b] = parts;
    }
    __syncthreads();
  }
  auto blocks_on_line = [&](int request) { return static_cast<int>(start[request + 1] - start[request]) - overhead; };

  const long long total = start[b] * passes;
  const long long range = max((total + groups - 1) / groups, static_cast<long long>(overhead) + 1);
  for (int g = thread; g <= groups; g += kThreads) {
    const long long at = range * g;
    int v = b * passes, block = 0;
    if (at < total) {
      int low = 0, high = b;  // the last request that begins at or before `at`
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (start[middle] * passes <= at) low = middle; else high = middle;
      }
      const int blocks = blocks_on_line(low), weight = blocks + overhead;
      const int inside = static_cast<int>(at - start[low] * passes);
      v = low * passes + inside / weight;
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
  __syncthreads();
  if (thread == 0 && !split) {
    int count = 0;
    for (int g = 0; g <= groups; ++g) {
      cuts_before[g] = count;
      const bool cuts = cut_block[g] > 0,
                 first = g == 0 || cut_request[g - 1] != cut_request[g] || cut_block[g - 1] == 0;
      count += cuts && first;
    }
    cuts_before[groups + 1] = count;
  }
  __syncthreads();

  for (int worker = thread; worker < side * groups; worker += kThreads) {
    const int g = worker / side, m = worker % side;
    WorkItem* out = items + static_cast<long long>(worker) * rounds;
    const int last = cut_request[g + 1], last_block = cut_block[g + 1];
    for (int v = cut_request[g]; v < last || (v == last && last_block > 0); ++v) {
      const int request = v / passes, row_tile = v % passes * side + m;
      if (row_tile >= row_tiles) continue;
      const int blocks = blocks_on_line(request), tokens = lengths[request];
      const int begin = v == cut_request[g] ? cut_block[g] : 0, end = v == last ? last_block : blocks;
      if (split) {
        const int parts = parts_of(blocks), first_slot = m * slots_per_tile + first_part[request] + v % passes * parts;
        for (int at = begin; at < end; at += split)
          *out++ = {request, row_tile, at, min(at + split, end), tokens, parts ? first_slot + at / split : -1, {}};
        if (begin == 0) combines[v * side + m] = {request, row_tile, first_slot, parts};
        continue;
      }
      int slot = -1;
      if (begin > 0 || end < blocks) {
        // Its cuts before boundary g are counted there; a request that begins here is counted at boundary g + 1.
        const int boundary = begin > 0 ? g : g + 1;
        int first = boundary;
        while (first > 1 && cut_request[first - 1] == v && cut_block[first - 1] > 0) --first;
        const int index = cuts_before[first];
        slot = m * slots_per_tile + g + index;
        if (begin == 0) {
          int parts = 2;
          for (int next = g + 2; next <= groups && cut_request[next] == v && cut_block[next] > 0; ++next) ++parts;
          combines[index * side + m] = {request, row_tile, slot, parts};
        }
      }
      *out++ = {request, row_tile, begin, end, tokens, slot, {}};
    }
    *out = {};
  }
  if (split) {  // requests of one part have written theirs above, with 0 slots; tiles that do not exist have none
    for (int i = thread; i < combine_items; i += kThreads)
      if (i / side % passes * side + i % side >= row_tiles) combines[i] = {};
  } else {
    for (int i = cuts_before[groups + 1] * side + thread; i < combine_items; i += kThreads) combines[i] = {};
    // A cut request has row tiles m < side in every pass but maybe the last.
    for (int worker = thread; worker < side * groups; worker += kThreads) {
      const int g = worker / side + 1, m = worker % side;
      const bool cuts = g <= groups && cut_block[g] > 0 && cuts_before[g + 1] > cuts_before[g];
      if (cuts && cut_request[g] % passes * side + m >= row_tiles) combines[cuts_before[g] * side + m] = {};
    }
  }
}

}  // namespace hypermla::cute
