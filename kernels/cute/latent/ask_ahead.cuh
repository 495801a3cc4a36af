// Asks L2 for the first tokens of a thread block while the kernel before this one ends: by a warp that has nothing else
// to do, before it waits for that kernel.
//
// The list of work and the table may be written by then or not. So what is read of them is a guess: it is kept within
// the table's rows, the copy engine passes over pages and tokens that do not exist, and nothing of it stays in L1,
// where those would find it who read it once it is written.
#pragma once

#include "hopper/global.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "latent/start.cuh"

namespace hypermla::cute::latent {

// Token boxes as the maps of LatentArguments have them: 64 rows and 2 groups of z_map, or a smaller page and 1 group.
template <auto problem>
__device__ __forceinline__ void ask_ahead(const LatentArguments& with) {
  static_assert(kTile == 64 && !is_gathered(problem.page));
  constexpr int kPages = pages_of_block(problem.page);
  if (with.ahead == 0) return;
  const uint4* const own = reinterpret_cast<const uint4*>(with.own_work());
  const uint4 place = load_at_once<uint4>(own, true), of_request = load_at_once<uint4>(own + 1, true);
  const u32 request = place.x, begin = place.z, end = place.w, tokens = of_request.x;
  const u32 lane = lane_id(), token = begin * kTile + lane * (kTile / kPages);
  if (lane >= static_cast<u32>(with.ahead) * kPages || request >= static_cast<u32>(with.requests)) return;
  if (begin >= 1u << 20 || begin + lane / kPages >= end || token >= tokens) return;
  int row = static_cast<int>(token), batch = static_cast<int>(request);
  if constexpr (problem.page > 0) {
    const u32 page = token / problem.page;
    if (page >= static_cast<u32>(with.table_width)) return;
    const int* const entry = with.block_table + static_cast<u64>(request) * static_cast<u32>(with.table_width) + page;
    batch = static_cast<int>(load_at_once<u32>(entry, true));
    row = static_cast<int>(token % problem.page);
  }
  constexpr int kGroups = kPages > 1 ? 1 : 2;
#pragma unroll 1
  for (int group = 0; group < 8; group += kGroups) tma_prefetch(with.z_map, row, group, batch);
  tma_prefetch(with.kpe_map, row, 0, batch);
}

}  // namespace hypermla::cute::latent
