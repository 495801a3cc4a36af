// The load of the queries of a work item.
#pragma once

#include "hopper/mbarrier.h"
#include "hopper/tma.h"
#include "latent/arguments.h"

namespace hypermla::cute::latent {

// Where they begin in their maps, whose boxes have zeros behind the end of the request.
struct QueryBox {
  int inner, outer, end;

  __device__ __forceinline__ QueryBox(const LatentArguments& with, const WorkItem& item, int tile_rows) {
    const unsigned row = item.first_row + item.row_tile * tile_rows, place = with.query_inner.divide(row);
    inner = row - place * with.query_inner.by;
    end = with.query_inner.divide(item.first_row + item.queries * with.heads);
    outer = with.query_places + place - end;
  }
  template <Keep keep = Keep::normal>
  __device__ __forceinline__ void load(u32 to, const TensorMap& map, int group, u32 full) const {
    tma_load<keep>(to, map, inner, outer, group, end, full);
  }
};

// `groups` groups of columns of qc_map, box_groups in a box, then the one of qpe_map, to lines of 128 bytes or less,
// `bytes` in all, which arrive at `full`. One thread.
template <int tile_rows, int groups, int box_groups, u32 bytes>
__device__ __forceinline__ void load_queries(u32 to, const WorkItem& item, const LatentArguments& with, u32 full) {
  const QueryBox at(with, item, tile_rows);
  constexpr u32 kGroup = tile_rows * 128;
  barrier_expect(full, bytes);
#pragma unroll
  for (int i = 0; i < groups; i += box_groups) at.load(to + i * kGroup, with.qc_map, i, full);
  at.load(to + groups * kGroup, with.qpe_map, 0, full);
}

// The queries of all items, by `load`, which waits for their place to be empty, in the phase that it is given. One
// thread, apart from those that load tokens: these first read the table, and run ahead of the item at work.
template <class Load>
__device__ __forceinline__ void load_all_queries(const WorkItem* __restrict__ work, const Load& load) {
  for (u32 phase = 1;; phase ^= 1, ++work) {
    const WorkItem item = *work;
    if (item.begin == item.end) break;
    load(item, phase);
  }
}

}  // namespace hypermla::cute::latent
