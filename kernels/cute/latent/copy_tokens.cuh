// Tokens from the cache to shared memory as they lie in the cache, wherever that is, one copy each.
#pragma once

#include "hopper/bulk.h"
#include "hopper/constants.h"
#include "hopper/fragments.h"
#include "hopper/warpgroup.h"
#include "latent/load_queries.cuh"

namespace hypermla::cute::latent {

inline constexpr int kScalesAt = 512, kRopeAt = 528;  // bytes in a token of 656: 4 fp32, and 64 bf16
inline constexpr int kNarrowRopeAt = 512;             // of 576 bytes
inline constexpr int kWideRopeAt = 1024;              // of 16 bits an element, 1152 bytes

// The warpgroup that copies tokens: a warp 16 of each block, half of its lanes one each. A place of the ring is for
// half a block. An entry of the table that names no row of the pool is no token: its place is zeroed, and the consumers
// hide its scores.
//
// Tokens of 16 bits an element may be in two pools, latents and RoPE.
//
// Layout: the struct of the kernel's shared memory, with the members that are named here; N: rows of a tile.
template <auto problem, int N, Keep keep = Keep::normal, class Layout>
__device__ __forceinline__ void copy_tokens(Layout& shared, const WorkItem* __restrict__ work,
                                            const LatentArguments& with) {
  const int lane = lane_id(), warp = (thread_id() >> 5) & 3, row = warp * 16 + (lane & 15);
  const unsigned char* __restrict__ from = static_cast<const unsigned char*>(with.z);
  constexpr int kBytes = problem.fp8 ? problem.fp8 : kWideRopeAt + 128;
  const unsigned char* __restrict__ const rope = static_cast<const unsigned char*>(with.kpe);
  const bool apart = !problem.fp8 && (rope != from + kWideRopeAt || with.kpe_stride != with.z_stride);
  int in_ring = warp >> 1;  // of the warp's half of the next block
  u32 phase = 1, queries_phase = 1;
  const auto load_next_queries = [&] {
    if (warp > 0 || lane > 0) return;
    barrier_wait(shared.queries_empty, queries_phase);
    queries_phase ^= 1;
    if (problem.fp8 == 576 && with.q_scale)  // pairs of e4m3
      load_queries<N, 4, 2, 9 * N * 64>(shared.queries, *work, with, shared.queries_full);
    else
      load_queries<N, 8, 2, 9 * N * 128>(shared.queries, *work, with, shared.queries_full);
  };
  for (bool begun = false;; begun = true, ++work) {
    const int begin = work->begin, end = work->end, tokens = work->tokens;
    if (begin == end) break;
    const int* __restrict__ table =
        with.block_table + static_cast<u64>(static_cast<u32>(work->request)) * static_cast<u32>(with.table_width);
    int next = 0;  // the entry for the next block; what is to be made of it is made where it is used
    auto read_entry = [&](int block) {
      const int token = block * kTile + row;
      if (block < end && token < tokens) next = table[with.page.divide(token)];
    };
    read_entry(begin);
    if (!begun)
      load_next_queries();  // while the table is read; later ones when the queries before are not needed any more
    for (int block = begin; block < end; ++block) {
      const int token = block * kTile + row;
      int place = -1;  // of the token in the pool; -1: there is none
      if (token < tokens)
        place = with.place_of(next * with.page_places + token - with.page.divide(token) * with.page.by);
      read_entry(block + 1);
      const u32 present = __ballot_sync(~0u, place >= 0) & 0xffff;
      barrier_wait(shared.empty[in_ring], phase);
      const u32 full = shared.full[in_ring];
      if (lane == 0) {
        *const_cast<volatile u32*>(&shared.present[in_ring][warp & 1]) = present;
        barrier_expect(full, __popc(present) * kBytes);
      }
      __syncwarp();
      if (lane < 16) {
        const u32 to = shared.tokens[in_ring] + (row & 31) * Layout::kLine;
        if (place >= 0) {
          const auto at = [&](const unsigned char* pool, int stride) {
            return pool + static_cast<u64>(static_cast<u32>(place)) * static_cast<u32>(stride);
          };
          if (!apart) {
            copy_bulk<kBytes, keep>(to, at(from, with.z_stride), full);
          } else {
            copy_bulk<kWideRopeAt, keep>(to, at(from, with.z_stride), full);
            copy_bulk<128, keep>(to + kWideRopeAt, at(rope, with.kpe_stride), full);
          }
        } else {
#pragma unroll 1
          for (int i = 0; i < kBytes; i += 16) store_zeros(to + i);
          async_fence();  // the copy engine comes next
        }
      }
      barrier_arrive(full);
      __syncwarp();
      in_ring += 2;
      if (in_ring >= Layout::kHalves) {
        in_ring -= Layout::kHalves;
        phase ^= 1;
      }
      if (begun && block == begin) load_next_queries();
      __syncwarp();
    }
  }
}

}  // namespace hypermla::cute::latent
