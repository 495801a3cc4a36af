// Moves the items of both planners' lists to where they belong. Own tokens are planned as if nothing lay before them:
// their blocks are those behind the prefix. Groups are planned as if they were all requests there are: their rows begin
// at the queries of their first one, whose row of the table they read.
//
// A warp for each worker of both lists.
#pragma once

#include "hopper/warpgroup.h"
#include "shared_prefixes.h"

namespace hypermla::cute {

__global__ void __launch_bounds__(32) move_items(const __grid_constant__ MoveItemsArguments with) {
  const int worker = static_cast<int>(blockIdx.x) - with.own_workers, lane = threadIdx.x;
  const bool own = worker < 0;
  const int rounds = own ? with.own_rounds : with.prefix_rounds;
  WorkItem* const items = own ? with.own + static_cast<long long>(blockIdx.x) * rounds
                              : with.prefixes + static_cast<long long>(worker) * rounds;
  for (unsigned closed = 0, first = 0; !closed; first += 32) {
    const int at = static_cast<int>(first) + lane;
    closed = __ballot_sync(~0u, at >= rounds || items[at].begin == items[at].end);
    if (closed << (31 - lane)) continue;  // the item that closes the list is this one, or before it
    WorkItem& item = items[at];
    if (own) {
      const int blocks = with.prefix_blocks[item.request];
      item.begin += blocks;
      item.end += blocks;
      item.tokens += 64 * blocks;
    } else {
      const PrefixGroup group = with.group[item.request];
      // The rows that the planner counted before the group's are those of other groups.
      item.first_row = group.query * with.heads;
      item.request = group.request;
    }
  }
}

}  // namespace hypermla::cute
