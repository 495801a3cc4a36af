// The second kernel of MlaCacheOps::split_prefixes(), behind match_prefixes.cuh: divides the requests of a step between
// kept prefixes and their own tokens. The first block counts and orders the queries, the others copy tables and
// lengths.
//
// grid = 1 + ceil(requests / kSplitRequests); kSplitThreads threads. Runs on every GPU from sm_80 on.
#pragma once

#include "cache_ops.h"
#include "latent/plan_requests.cuh"  // sum_before

namespace hypermla::cute {

__global__ void __launch_bounds__(kSplitThreads) split_requests(const __grid_constant__ SplitArguments with) {
  constexpr int kThreads = kSplitThreads, kOfRequest = kThreads / kSplitRequests;
  __shared__ KeptPrefix prefixes[kMostPrefixes];
  __shared__ int queries[kMostPrefixes];  // that share a prefix
  __shared__ int order[kMostPrefixes];    // by rising first tokens
  __shared__ int sums[kThreads / 32];
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread < with.count) {
    prefixes[thread] = with.prefixes[thread];
    queries[thread] = 0;
  }
  __syncthreads();
  auto found_of = [&](int r) {  // the longest valid one; -1: none
    int longest = 0, found = -1;
    for (unsigned left = with.count > 0 && r < with.requests ? with.found[r] : 0; left; left &= left - 1) {
      const int p = __ffs(left) - 1;
      if (prefixes[p].valid && prefixes[p].pages > longest) longest = prefixes[p].pages, found = p;
    }
    return found;
  };
  auto queries_of = [&](int r) { return with.query_starts[r + 1] - with.query_starts[r]; };
  if (with.count > 0) {
    for (int first = thread - lane; first < with.requests; first += kThreads) {
      const int r = first + lane, found = found_of(r), own = found < 0 ? 0 : queries_of(r);
      for (unsigned left = __ballot_sync(~0u, found >= 0); left;) {  // a prefix in each turn
        const int p = __shfl_sync(~0u, found, __ffs(left) - 1);
        const int sum = __reduce_add_sync(~0u, found == p ? own : 0);
        if (lane == 0) atomicAdd(&queries[p], sum);
        left &= ~__ballot_sync(~0u, found == p);
      }
    }
    __syncthreads();
    if (thread < with.count && queries[thread] < prefixes[thread].least_queries) queries[thread] = 0;
    __syncthreads();
  }
  auto shared = [&](int found) { return found >= 0 && queries[found] > 0; };

  if (blockIdx.x > 0) {
    const int r = static_cast<int>((blockIdx.x - 1) * kSplitRequests) + thread / kOfRequest, found = found_of(r);
    if (r >= with.requests) return;
    const int pages = shared(found) ? prefixes[found].pages : 0;
    const int own = with.lengths[r] - pages * with.page;
    const int end = own <= 0 ? 0 : min(pages + (own - 1) / with.page + 1, with.width);
    const int* const table = with.block_table + r * with.table_stride;
    int* const to = with.own_table + r * with.own_table_stride;
    for (int i = pages + thread % kOfRequest; i < end; i += kOfRequest) to[i - pages] = table[i];
    if (thread % kOfRequest == 0) with.own_lengths[r] = own;
    return;
  }
  auto first_token = [&](int p) { return prefixes[p].pages > 0 ? prefixes[p].first_token : -1; };
  if (thread < with.count) {  // places that hold nothing come first, by number
    int rank = 0;
    for (int other = 0; other < with.count; ++other) {
      const int at = first_token(other), own = first_token(thread);
      rank += at < own || (at == own && other < thread);
    }
    order[rank] = thread;
  }
  __syncthreads();
  const int each = (with.requests + kThreads - 1) / kThreads;
  const int first = min(thread * each, with.requests), last = min(first + each, with.requests);
  int before = 0;  // queries that share the prefixes before this one
  for (int i = 0; i < with.count; ++i) {
    const int p = order[i], all = queries[p];
    if (thread == 0) {
      with.shared_query_starts[2 * i] = before;
      with.shared_query_starts[2 * i + 1] = before + all;
      with.shared_token_starts[2 * i] = max(first_token(p), 0);
      with.shared_token_starts[2 * i + 1] = max(first_token(p), 0) + prefixes[p].pages * with.page;
    }
    if (all == 0) continue;
    int own = 0;
    for (int r = first; r < last; ++r) own += found_of(r) == p ? queries_of(r) : 0;
    int at = before + sum_before<kThreads>(own, sums).before;
    for (int r = first; r < last; ++r)
      if (found_of(r) == p)
        for (int query = with.query_starts[r]; query < with.query_starts[r + 1]; ++query) with.query_rows[at++] = query;
    before += all;
    __syncthreads();  // before the sums are written again
  }
}

}  // namespace hypermla::cute
