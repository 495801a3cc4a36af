// The first kernel of MlaCacheOps::split_prefixes(): which prefixes each request of a step has, bit by bit, and which
// are not valid any more. A second one follows (split_requests.cuh), since who shares a prefix decides whether it is
// attended to at all.
//
// A warp takes a request. grid: up to what requests and slots fill; kMatchThreads threads. Runs on every GPU from sm_80
// on.
#pragma once

#include "cache_ops.h"
#include "hopper/warpgroup.h"

namespace hypermla::cute {

__global__ void __launch_bounds__(kMatchThreads) match_prefixes(const __grid_constant__ SplitArguments with) {
  const int lane = threadIdx.x % 32, blocks = static_cast<int>(gridDim.x);
  for (int r = blockIdx.x * kMatchRequests + threadIdx.x / 32; r < with.requests; r += blocks * kMatchRequests) {
    const int* const table = with.block_table + r * with.table_stride;
    const int before = with.lengths[r] - (with.query_starts[r + 1] - with.query_starts[r]);  // tokens
    unsigned found = 0;
    for (int p = 0; p < with.count; ++p) {
      const int count = with.prefixes[p].pages;
      if (count < 1 || count > with.width || before / with.page < count) continue;
      const int* const pages = with.prefix_pages + p * with.prefix_pages_stride;
      bool same = table[0] == pages[0];  // of most prefixes that is not so
      if (same)
        for (int i = lane; i < count; i += 32) same &= table[i] == pages[i];
      if (__all_sync(~0u, same)) found |= 1u << p;
    }
    if (lane == 0) with.found[r] = found;
  }
  for (int i = blockIdx.x * kMatchThreads + threadIdx.x; i < with.tokens; i += blocks * kMatchThreads) {
    const long long page = with.slots[i] < 0 ? -1 : with.slots[i] / with.page;
    unsigned owners = page >= 0 && page < with.cache_pages ? with.owners[page] : 0;
    for (; owners; owners &= owners - 1)
      if (const int p = __ffs(owners) - 1; p < with.count) with.prefixes[p].valid = 0;
  }
}

}  // namespace hypermla::cute
