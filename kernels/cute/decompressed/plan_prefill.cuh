// Makes the list of a prefill step (prefill_list.h) from where requests begin. One thread block.
//
// Requests are sorted by their tokens, roughly: into classes of lengths that differ by at most an eighth. Which of a
// class comes first is left to chance; it changes no result. Starts that are negative or go beyond the capacity are cut
// to it and reported. Where query starts fall there are no tiles: requests would share queries, and have more tiles in
// all than an integer holds. Nor are there any where a query's row is none of the capacity.
//
// Tiles are cut into parts where that lets the thread blocks end sooner, by an estimate that counts blocks of tokens.
// Each warp makes it for another length of parts.
#pragma once

#include "hopper/constants.h"
#include "latent/plan_requests.cuh"  // sums_before
#include "prefill_list.h"

namespace hypermla::cute {

inline constexpr int kLengthClasses = 128;
inline constexpr int kNoTiles = 4;  // beside the bits of PrefillStatus, and in no status

// Class 0 are requests without tokens. Blocks up to 8192 have 3 bits behind the leading one.
__device__ __forceinline__ int length_class(int tokens) {
  if (tokens == 0) return 0;
  const int blocks = (tokens + kBlock - 1) / kBlock;
  return (__float_as_int(static_cast<float>(blocks)) >> 20) - (127 << 3) + 1;
}

// The blocks of tokens that some query sees: of a request's longest tile, and of its shortest.
struct SeenBlocks {
  int most, least;
};
__device__ __forceinline__ SeenBlocks seen_blocks(const PrefillItem& item, bool causal) {
  const int most = (item.tokens + kBlock - 1) / kBlock;
  if (!causal || item.queries <= kRows) return {most, most};
  return {most, max(0, item.tokens - item.queries + 2 * kRows - 1) / kBlock};
}

// Into how many parts the tokens of a request's tiles are cut, for parts of up to `length` blocks.
__device__ __forceinline__ int parts_for(SeenBlocks blocks, int length) {
  const int parts =
      1 + static_cast<int>(__fdividef(static_cast<float>(blocks.most) - 0.5f, static_cast<float>(length)));
  return max(1, min(parts, min(blocks.least, kMaxPrefillParts)));
}

// How long the attention takes with parts of up to `length` blocks: the longest of them, or the rounds in which thread
// blocks attend as many as there are, or all work in equal shares. Tiles of up to half the length are in no round: they
// fill what the others leave. Infinite where the slots do not suffice. All lanes of a warp, in turns over the items, of
// which item(i) is number i.
template <class Item>
__device__ __forceinline__ float time_with_parts(const PlanPrefillArguments& with, int items, Item item, int length) {
  // In blocks, as measured on an H200: a part that is stored, and a whole tile; a merge by one thread block, and what
  // all rows of a warpgroup take more, and each part of them; a merge by those of all parts, and what each takes more.
  constexpr float kOfPart = 2.0f, kOfTile = 0.5f, kOfMerge = 1.0f, kOfRows = 1.0f, kOfMerged = 0.4f, kOfShare = 1.0f,
                  kOfShares = 0.1f;
  float work = 0.0f, all_tiles = 0.0f, long_work = 0.0f, long_parts = 0.0f, slots = 0.0f, longest = 0.0f;
  float merge = 0.0f, shared_merge = 0.0f;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < items; i += 32) {
    const PrefillItem of = item(i);
    if (of.queries == 0) continue;
    const SeenBlocks seen = seen_blocks(of, with.causal);
    const int parts = parts_for(seen, length);
    const float tiles = static_cast<float>(prefill_row_tiles(of.queries)) * static_cast<float>(with.heads);
    const float all_parts = tiles * static_cast<float>(parts);
    const float own =
        tiles * static_cast<float>(seen.most + seen.least) * 0.5f + all_parts * (parts > 1 ? kOfPart : kOfTile);
    work += own;
    all_tiles += all_parts;
    if (2 * seen.most > length) {
      long_work += own;
      long_parts += all_parts;
    }
    if (parts > 1) {
      const float rows = static_cast<float>(min(of.queries, kGroupRows)) / static_cast<float>(kGroupRows);
      merge = fmaxf(merge, kOfMerge + rows * (kOfRows + kOfMerged * static_cast<float>(parts)));
      shared_merge = fmaxf(shared_merge, kOfShare + kOfShares * static_cast<float>(parts));
      slots += all_parts;
    }
    longest = fmaxf(longest, static_cast<float>((seen.most + parts - 1) / parts));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    work += __shfl_xor_sync(~0u, work, step);
    all_tiles += __shfl_xor_sync(~0u, all_tiles, step);
    long_work += __shfl_xor_sync(~0u, long_work, step);
    long_parts += __shfl_xor_sync(~0u, long_parts, step);
    slots += __shfl_xor_sync(~0u, slots, step);
    longest = fmaxf(longest, __shfl_xor_sync(~0u, longest, step));
    merge = fmaxf(merge, __shfl_xor_sync(~0u, merge, step));
    shared_merge = fmaxf(shared_merge, __shfl_xor_sync(~0u, shared_merge, step));
  }
  if (slots > static_cast<float>(with.slots)) return kInfinity;
  const float processors = static_cast<float>(with.processors);
  const float rounds = 1.0f + floorf(__fdividef(long_parts - 0.5f, processors));
  const float time = fmaxf(longest + (merge > 0.0f ? kOfPart : kOfTile),
                           fmaxf(rounds * __fdividef(long_work, long_parts), __fdividef(work, processors)));
  // Whoever merges is late, and so the last to store its next part, too: it merges in every round.
  return time + (all_tiles <= processors ? shared_merge : rounds * merge);
}

template <PlanPrefillTiling tiling>
__global__ void __launch_bounds__(tiling.threads, 1) plan_prefill(const __grid_constant__ PlanPrefillArguments with) {
  constexpr int kThreads = tiling.threads;
  static_assert(kThreads > kLengthClasses);
  __shared__ int of_class[kLengthClasses];  // requests; then where the next one of the class goes
  __shared__ short order[kMaxPlannedRequests];
  __shared__ int sums[2][kThreads / 32], wrong, most_tokens;
  __shared__ float times[kThreads / 32];
  const int thread = threadIdx.x, b = with.requests;

  struct Request {
    PrefillItem item;  // as far as it does not depend on others
    int wrong;         // bits of PrefillStatus: what was cut
  };
  auto read = [&](int r) -> Request {
    const int query = with.query_starts[r], token = with.token_starts[r];
    const long long queries = static_cast<long long>(with.query_starts[r + 1]) - query,
                    tokens = static_cast<long long>(with.token_starts[r + 1]) - token;
    const bool falls = queries < 0, fit = query >= 0 && !falls && query + queries <= with.all_queries;
    const int used =
        token < 0 || tokens < 0 ? 0 : static_cast<int>(min(tokens, static_cast<long long>(with.max_tokens)));
    return {{.first_tile = 0,
             .section = 0,
             .query = query,
             .queries = fit ? static_cast<int>(queries) : 0,
             .token = token,
             .tokens = used,
             .parts = 1,
             .first_slot = 0},
            (fit ? 0 : kWrongQueryStarts) | (falls ? kNoTiles : 0) | (used == tokens ? 0 : kWrongTokenStarts)};
  };

  launch_next();
  wait_for_previous();
  if (thread < kLengthClasses) of_class[thread] = 0;
  if (thread == 0) wrong = most_tokens = 0;
#pragma unroll 1
  for (int i = thread; i < with.slots; i += kThreads) with.arrived[i] = 0;  // other work may have had the workspace
  __syncthreads();
#pragma unroll 1
  for (int r = thread; r < b; r += kThreads) {
    const auto [item, cut] = read(r);
    if (item.queries > 0) {
      atomicAdd(&of_class[length_class(item.tokens)], 1);
      atomicMax(&most_tokens, item.tokens);
    }
    if (cut) atomicOr(&wrong, cut);
  }
  if (with.query_rows) {  // who names no row has no place
    const int first = b > 0 ? max(with.query_starts[0], 0) : 0;
    const int last = b > 0 ? min(with.query_starts[b], with.all_queries) : 0;
    bool beyond = false;
#pragma unroll 1
    for (int i = first + thread; i < last; i += kThreads) {
      const int row = with.planned_rows[i] = with.query_rows[i];
      beyond |= row < 0 || row >= with.all_queries;
    }
    if (beyond) atomicOr(&wrong, kWrongQueryStarts | kNoTiles);
  }
  __syncthreads();
  const int own_class = kLengthClasses - 1 - thread;  // long requests first
  const int place = sum_before<kThreads>(own_class >= 0 ? of_class[own_class] : 0, sums[0]).before;
  if (own_class >= 0) of_class[own_class] = place;
  __syncthreads();
#pragma unroll 1
  for (int r = thread; r < b; r += kThreads) {
    const PrefillItem item = read(r).item;
    if (item.queries > 0) order[atomicAdd(&of_class[length_class(item.tokens)], 1)] = static_cast<short>(r);
  }
  // In the order of the requests, not of the list: which of a class comes first must not decide where tokens are cut.
  const int most_blocks = (most_tokens + kBlock - 1) / kBlock;
  auto length_of = [&](int warp) {  // of parts: 1, 2, .. 8, 10, .. 16, 20, .. of the longest tile
    const int parts = warp < 8 ? warp + 1 : warp < 12 ? 2 * warp - 6 : 4 * warp - 28;
    return max(1, (most_blocks + parts - 1) / parts);
  };
  int length = 0;  // of parts; 0: nothing is cut
  if (with.slots > 0 && most_blocks > 1) {
    const auto item = [&](int r) { return read(r).item; };
    const float time = time_with_parts(with, b, item, length_of(thread / 32));
    if (thread % 32 == 0) times[thread / 32] = time;
    __syncthreads();
    const int lane = thread % 32;
    const int own = __float_as_int(lane < kThreads / 32 ? times[lane] : kInfinity);  // as ordered as the numbers are
    const int least = __reduce_min_sync(~0u, own);
    constexpr float kGain = 0.95f;  // what the time must fall to
    if (__int_as_float(least) < kGain * times[0]) length = length_of(__ffs(__ballot_sync(~0u, own == least)) - 1);
  } else {
    __syncthreads();
  }

  const int items = wrong & kNoTiles ? 0 : of_class[0];  // behind the last of the last class
  const int each = (items + kThreads - 1) / kThreads, first = min(items, thread * each),
            last = min(items, first + each);
  auto planned = [&](int i) {
    PrefillItem item = read(order[i]).item;
    if (length) item.parts = parts_for(seen_blocks(item, with.causal), length);
    return item;
  };
  auto tiles_of = [&](const PrefillItem& item) { return prefill_row_tiles(item.queries) * with.heads * item.parts; };
  auto slots_of = [&](const PrefillItem& item) { return item.parts > 1 ? tiles_of(item) : 0; };
  int tiles = 0, slots = 0;
#pragma unroll 1
  for (int i = first; i < last; ++i) {
    const PrefillItem item = planned(i);
    tiles += tiles_of(item);
    slots += slots_of(item);
  }
  const SumsBefore<2> before = sums_before<kThreads, 2>({tiles, slots}, sums);
  int at = before.before[0], slot = before.before[1];
#pragma unroll 1
  for (int i = first; i < last; ++i) {
    PrefillItem item = planned(i);
    item.first_tile = at;
    item.first_slot = slot;
    constexpr unsigned kTokenBytes = 2 * 128 * 2;  // key and value of a head
    const unsigned fit = (unsigned{tiling.section} << 20) / kTokenBytes / static_cast<unsigned>(max(item.tokens, 1));
    item.section = heads_of_section(with.heads, max(1u, min(fit, static_cast<unsigned>(with.heads))));
    reinterpret_cast<PrefillItem*>(with.list + 1)[i] = item;
    at += tiles_of(item);
    slot += slots_of(item);
  }
  if (thread == kThreads - 1) *with.list = {.drawn = 0, .tiles = at, .items = items, .status = wrong & ~kNoTiles};
}

}  // namespace hypermla::cute
