// Finds the prefixes that neighbouring requests share, by the pages that their tables begin with, and decides which of
// them are attended to once for all of their requests.
//
// A request may share what lies before its new tokens, so that each of its queries sees all of a prefix. common[r] is
// how many token blocks request r shares with the one before it. A run of requests that share `level` blocks or more
// may be a group, whose prefix is what all of them share. Levels fall from the largest power of two to the shortest
// prefix; runs of one level lie within those of the next. A run becomes one group where that saves more than the groups
// within it do. So samples of one question form a group although all questions begin with the same system prompt, and
// the system prompt is shared where nothing longer is.
//
// What a group saves: token blocks, times the row tiles that its requests fill together rather than one by one. Where
// each of them fills its tiles nothing is saved: the products are the same, and L2 has the tokens.
//
// One thread block, once per step. What counts is how often it waits for the table: eight threads compare the rows of
// two neighbours, 64 entries at a time.
#pragma once

#include "plan_requests.cuh"
#include "shared_prefixes.h"

namespace hypermla::cute {

__global__ void __launch_bounds__(kFindThreads, 1) find_prefixes(const __grid_constant__ FindPrefixesArguments with) {
  constexpr int kThreads = kFindThreads, kWarps = kThreads / 32, kMost = kMaxPlannedRequests;
  constexpr int kTeam = 8, kTeams = 32 / kTeam, kLoads = 8;  // threads of a pair of rows; entries of each in flight
  constexpr unsigned short kNone = 0xffff;
  __shared__ int query_start[kMost + 1], tiles_before[kMost + 1];
  __shared__ int of_request[kMost];  // entries of the table that it may share; then what the run that it heads saves
  // The head of its group, and of a head the blocks of the prefix.
  __shared__ unsigned short common[kMost], head[kMost], blocks[kMost];
  __shared__ int sums[kWarps], other_sums[kWarps], longest_of[kWarps];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, b = with.requests;
  const int each = (b + kThreads - 1) / kThreads, first = min(b, thread * each), last = min(b, first + each);
  const auto tiles_of = [&](int queries, int rows) { return (queries * with.heads + rows - 1) / rows; };

  // A step whose query starts are wrong, which the planners report, shares nothing.
  bool is_wrong = false;
  int own_tiles = 0;
  for (int r = first; r < last; ++r) {
    const int before = with.query_starts ? with.query_starts[r] : r * with.queries;
    const int behind = with.query_starts ? with.query_starts[r + 1] : before + with.queries;
    const bool wrong = before < 0 || behind < before || behind > with.all_queries || behind - before > with.queries ||
                       (r == 0 && before > 0);
    const int queries = wrong ? 0 : behind - before, tokens = with.lengths[r];
    is_wrong |= wrong;
    query_start[r] = before;
    if (r == b - 1) query_start[b] = behind;
    of_request[r] = queries > 0 && tokens > queries && tokens <= with.max_tokens ? (tokens - queries) / with.page : 0;
    own_tiles += tiles_of(queries, with.own_rows);
  }
  const unsigned wrong_ones = __ballot_sync(~0u, is_wrong);
  if (lane == 0) other_sums[warp] = wrong_ones != 0;
  const SumBefore tiles = sum_before<kThreads>(own_tiles, sums);
  const bool wrong = __ballot_sync(~0u, lane < kWarps && other_sums[lane % kWarps]) != 0;
  for (int r = first, at = tiles.before; r < last && !wrong; ++r) {
    tiles_before[r] = at;
    at += tiles_of(query_start[r + 1] - query_start[r], with.own_rows);
  }
  if (thread == 0) tiles_before[b] = tiles.all;

  int longest = 0;
  for (int of_warp = warp * kTeams; of_warp < b; of_warp += kWarps * kTeams) {
    const int r = of_warp + lane / kTeam;
    int equal = 0;  // entries, as far as is known
    const int* row = with.block_table;
    if (r > 0 && r < b && !wrong) {
      equal = min(of_request[r - 1], of_request[r]);
      row += r * with.table_stride;
    }
    for (int at = 0; __ballot_sync(~0u, at < equal); at += kTeam * kLoads) {
      int own[kLoads], before[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int entry = at + i * kTeam + lane % kTeam;
        own[i] = entry < equal ? row[entry] : 0;
        before[i] = entry < equal ? row[entry - with.table_stride] : 0;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const unsigned differ = __ballot_sync(~0u, own[i] != before[i]) >> lane / kTeam * kTeam & ((1 << kTeam) - 1);
        if (differ) equal = min(equal, at + i * kTeam + __ffs(differ) - 1);
      }
    }
    const int shared = equal * with.page / 64;
    if (lane % kTeam == 0 && r < b) common[r] = static_cast<unsigned short>(shared);
    longest = max(longest, shared);
  }
  longest = __reduce_max_sync(~0u, longest);
  if (lane == 0) longest_of[warp] = longest;
  __syncthreads();  // all warps have read the entries
  longest = __reduce_max_sync(~0u, longest_of[lane % kWarps]);
  for (int r = thread; r < b; r += kThreads) of_request[r] = 0, head[r] = kNone;

  // A warp takes the runs that begin at its requests.
  int* const gain = of_request;
  for (int level = longest > 0 ? 1 << (31 - __clz(longest)) : 0; level >= max(with.least_blocks, 1); level /= 2) {
    __syncthreads();
#pragma unroll 1
    for (int h = warp; h < b; h += kWarps) {
      if (common[h] >= level) continue;
      int end = h + 1, least = 0x7fff, within = gain[h];
      for (int joined = 32; joined == 32; end += joined) {
        const int r = end + lane, of_lane = r < b ? common[r] : 0;
        const unsigned outside = __ballot_sync(~0u, of_lane < level);
        joined = outside ? __ffs(outside) - 1 : 32;
        least = min(least, -__reduce_max_sync(~0u, lane < joined ? -of_lane : -0x7fff));
        within += __reduce_add_sync(~0u, lane < joined ? gain[r] : 0);
      }
      if (end == h + 1) continue;
      const int together = tiles_of(query_start[end] - query_start[h], with.prefix_rows);
      const int saved = (tiles_before[end] - tiles_before[h] - together) * least - together * with.tile_cost;
      const bool taken = saved > within;
      for (int r = h + lane; r < end; r += 32) {
        gain[r] = r > h ? 0 : taken ? saved : within;
        if (taken) head[r] = static_cast<unsigned short>(h);
      }
      if (taken && lane == 0) blocks[h] = static_cast<unsigned short>(least);
      __syncwarp();  // a request before it adds its gain up
    }
  }
  __syncthreads();

  int all_gain = 0;
  for (int r = first; r < last; ++r) all_gain += gain[r];
  all_gain = sum_before<kThreads>(all_gain, other_sums).all;
  const bool worth = all_gain > 0 && all_gain >= with.least_gain;
  const auto head_of = [&](int r) { return worth ? head[r] : kNone; };
  int own_heads = 0, own_queries = 0;
  for (int r = first; r < last; ++r) {
    own_heads += head_of(r) == r;
    own_queries += head_of(r) != kNone ? query_start[r + 1] - query_start[r] : 0;
  }
  const SumBefore groups = sum_before<kThreads>(own_heads, sums);
  const SumBefore queries = sum_before<kThreads>(own_queries, other_sums);
  for (int r = first, g = groups.before, at = queries.before; r < last; ++r) {
    const int h = head_of(r), of_prefix = h != kNone ? blocks[h] : 0;
    with.own_lengths[r] = with.lengths[r] - 64 * of_prefix;
    with.prefix_blocks[r] = of_prefix;
    if (h == r) {
      with.group[g] = {r, query_start[r]};
      with.prefix_lengths[g] = 64 * of_prefix;
      with.prefix_starts[g++] = at;
    }
    if (wrong) continue;
    for (int query = query_start[r]; query < query_start[r + 1]; ++query)
      with.places[query] = {h != kNone ? r : -1, query - query_start[r]};
    if (h != kNone) at += query_start[r + 1] - query_start[r];
  }
  for (int g = groups.all + thread; g <= with.groups; g += kThreads) {
    with.prefix_starts[g] = queries.all;
    if (g < with.groups) with.prefix_lengths[g] = 0;
  }
  for (int query = (wrong || b == 0 ? 0 : query_start[b]) + thread; query < with.all_queries; query += kThreads)
    with.places[query] = {-1, 0};
}

}  // namespace hypermla::cute
