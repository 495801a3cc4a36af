// Sorts requests by their prefix, in their order, and cuts them into chunks whose queries make one tile. One block; a
// warp takes a prefix, so the result does not depend on timing.
#pragma once

#include "hopper/warpgroup.h"
#include "plan_prefixes.h"

namespace hypermla::cute {

template <PlanPrefixesProblem problem, PlanPrefixesTiling tiling>
__global__ void __launch_bounds__(tiling.threads, 1) plan_prefixes(const __grid_constant__ PlanPrefixesArguments with) {
  constexpr int kThreads = tiling.threads, kWarps = kThreads / 32;
  const int b = with.b, s = with.s, prefixes = with.prefixes, parts = with.parts;
  __shared__ int of_request[kMaxPrefixRequests];
  __shared__ int requests[kMaxPrefixes], first_request[kMaxPrefixes], first_chunk[kMaxPrefixes];
  launch_next();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous();
  for (int i = threadIdx.x; i < b; i += kThreads) of_request[i] = with.prefix[i];
  __syncthreads();
  // Calls visit(request, its place among the requests of the prefix) for those of one prefix; returns their number.
  auto for_requests = [&](int of_prefix, auto visit) {
    int found = 0;
    for (int base = 0; base < b; base += 32) {
      const bool mine = base + lane < b && of_request[base + lane] == of_prefix;
      const unsigned all = __ballot_sync(~0u, mine);
      if (mine) visit(base + lane, found + __popc(all & ((1u << lane) - 1)));
      found += __popc(all);
    }
    return found;
  };
  for (int i = warp; i < prefixes; i += kWarps) {
    const int found = for_requests(i, [](int, int) {});
    if (lane == 0) requests[i] = found;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int all_requests = 0, all_chunks = 0;
    for (int i = 0; i < prefixes; ++i) {
      first_request[i] = all_requests;
      first_chunk[i] = all_chunks;
      all_requests += requests[i];
      all_chunks += chunk_count(requests[i], s, parts);
    }
    with.count->chunks = all_chunks;
  }
  __syncthreads();
  Chunk* chunks = reinterpret_cast<Chunk*>(with.count + 1);
  for (int i = warp; i < prefixes; i += kWarps) {
    const int first = first_request[i];
    for_requests(i, [&](int request, int place) { with.order[first + place] = request; });
    for (int j = lane; j < chunk_count(requests[i], s, parts); j += 32)
      chunks[first_chunk[i] + j] =
          chunk_at(j, i, first, requests[i], with.lengths ? with.lengths[i] : with.t, s, parts);
  }
}

}  // namespace hypermla::cute
