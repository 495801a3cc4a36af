// The tokens of pages of 1, which lie anywhere in a pool, and the warpgroup of flash_mla.cuh that gathers them: the
// pages of a paged cache, or what an indexer chose for a query (sparse attention). An entry of the table that names no
// row of the pool is no token: its place is zeroed, and the consumers hide its scores (mask_absent).
//
// A warp brings 16 rows of every block, of each a thread the same 16 bytes or columns; 8 threads share a row. Every
// thread arrives at the barrier of a pair of boxes by itself. So the threads do not meet: beside wgmma a meeting, or a
// look at what has arrived, takes hundreds of cycles.
#pragma once

#include "hopper/gather.h"
#include "latent/attend_latent.cuh"

namespace hypermla::cute::latent {

inline constexpr int kGatherRows = 4;  // of a thread, 4 apart
inline constexpr int kGatherThreads = 128;

// What a thread of the warpgroup brings.
struct GatherThread {
  u32 thread = thread_id() & 127;

  // Of a row of 64 or 128 columns: its first column / 8 or / 16.
  __device__ __forceinline__ u32 unit() const { return thread & 7; }
  __device__ __forceinline__ u32 first_row() const { return thread / 32 * 16 + thread / 8 % 4; }

  // The one of the four that is for this lane, as lanes of a row share them out. By selection: an index that the
  // compiler does not know would send the array to memory.
  __device__ __forceinline__ int of_lane(const int (&place)[kGatherRows]) const {
    const int low = thread & 1 ? place[1] : place[0], high = thread & 1 ? place[3] : place[2];
    return thread & 2 ? high : low;
  }
  // Which of the warp's rows are there, as mask_absent() has it.
  __device__ __forceinline__ u32 present(const int (&place)[kGatherRows]) const {
    return __ballot_sync(~0u, unit() < kGatherRows && of_lane(place) >= 0);
  }
  // Says so, at the block's last barrier.
  __device__ __forceinline__ void tell(Shared<false>& shared, int slot, u32 present) const {
    if (thread % 32 == 0) {
      *const_cast<volatile u32*>(&shared.present[slot][thread / 32]) = present;
      barrier_arrive(shared.rope_full[slot]);
    }
  }
};

// Tokens in the type of the queries. The consumers wait for what this brings, and beside them a warp of it is slow to
// issue. So whatever can be known before a place is free is computed before: where the rows of two blocks lie, and a
// slot is a constant of the code.
template <auto tiling, Keep keep>
__device__ __forceinline__ void gather(Shared<false>& shared, const WorkItem* __restrict__ work,
                                       const LatentArguments& with) {
  const GatherThread own;
  const u32 first_row = own.first_row();
  const u32 in_box = first_row * 128 + ((own.unit() ^ (first_row & 3)) << 4);
  const u32 to = shared.pairs + in_box, to_rope = shared.ropes + in_box;
  const unsigned char* __restrict__ z = static_cast<const unsigned char*>(with.z) + own.unit() * 16;
  const unsigned char* __restrict__ kpe = static_cast<const unsigned char*>(with.kpe) + own.unit() * 16;
  u32 phase = 1, queries_phase = 1;
  for (bool begun = false;; ++work, begun = true) {
    const int begin = uniform(work->begin), end = uniform(work->end), tokens = work->tokens;
    if (begin == end) break;
    const int* __restrict__ table = with.block_table + static_cast<long long>(work->request) * with.table_width;
    // Of an even block and the odd one behind it. The entries of the table are those of the next two.
    int entry[2][kGatherRows], place[2][kGatherRows];  // rows of the pool; -1: none
    const unsigned char* from[2][kGatherRows];         // their latents
    u32 present[2];
    const int seen = min(end * kTile, tokens);
    auto read_entries = [&](int block) {
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
#pragma unroll
        for (int j = 0; j < kGatherRows; ++j) {
          const int token = (block + slot) * kTile + static_cast<int>(first_row) + 4 * j;
          entry[slot][j] = token < seen ? table[token] : -1;
        }
      }
    };
    read_entries(begin);
    auto find_rows = [&] {
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
#pragma unroll
        for (int j = 0; j < kGatherRows; ++j) {
          place[slot][j] = with.place_of(entry[slot][j]);
          from[slot][j] = z + static_cast<long long>(place[slot][j]) * with.z_stride;
          asm volatile("" : "+l"(from[slot][j]));  // here, not where they are used
        }
        present[slot] = own.present(place[slot]);
      }
    };
    auto bring_queries = [&] {
      if ((thread_id() & 127) == 0) {
        load_queries<tiling>(shared, *work, with, {}, queries_phase);
        queries_phase ^= 1;
      }
      __syncwarp();
    };
    if (!begun) bring_queries();  // while the table is read
    auto bring = [&]<int slot>(int block) {
      const auto place_of = [](int pair) { return slot * kPairs + order_of_release(slot, pair); };  // in the ring
      const auto full_of = [&](int pair) -> u32 {
        return pair == kRope ? shared.rope_full[slot] : shared.full[place_of(pair)];
      };
      const auto wait_until_free = [&](int pair) {
        barrier_wait(pair == kRope ? shared.rope_empty[slot] : shared.empty[place_of(pair)], phase);
      };
      // Row and row + 4 lie 512 bytes apart, and by the swizzle bit 6 of their units differs.
      auto box_of = [&](int pair, int j) {
        if (pair == kRope) return (to_rope ^ (j & 1) << 6) + slot * kBoxBytes + j * 512;
        return (to ^ (j & 1) << 6) + place_of(pair) * kPairBytes + j * 512;
      };
      if (present[slot] == kAllPresent) {
#pragma unroll
        for (int i = 0; i <= kRope; ++i) {
          const int pair = order_of_release(slot, i);
          wait_until_free(pair);
#pragma unroll
          for (int j = 0; j < kGatherRows; ++j) {
            if (pair == kRope) {
              copy_ahead<keep>(box_of(pair, j), kpe + static_cast<long long>(place[slot][j]) * with.kpe_stride);
            } else {
              copy_ahead<keep>(box_of(pair, j), from[slot][j] + pair * 256);
              copy_ahead<keep>(box_of(pair, j) + kBoxBytes, from[slot][j] + pair * 256 + 128);
            }
          }
          barrier_arrive_when_copied(full_of(pair));
          // Not beside find_rows(): a wait for the entries before would be one for these, too.
          if (slot == 0 && i == 0) read_entries(block + 2);
        }
      } else {
        if (slot == 0) read_entries(block + 2);
#pragma unroll 1
        for (int i = 0; i <= kRope; ++i) {
          const int pair = order_of_release(slot, i);
          wait_until_free(pair);
#pragma unroll 1
          for (int j = 0; j < kGatherRows && block < end; ++j) {
            const int row = j & 2 ? (j & 1 ? place[slot][3] : place[slot][2]) : j & 1 ? place[slot][1] : place[slot][0];
            if (pair == kRope) {
              const unsigned char* from = kpe + max(row, 0) * static_cast<long long>(with.kpe_stride);
              copy_ahead_or_zero(box_of(pair, j), from, row >= 0);
            } else {
              const unsigned char* from = z + max(row, 0) * static_cast<long long>(with.z_stride) + pair * 256;
              copy_ahead_or_zero(box_of(pair, j), from, row >= 0);
              copy_ahead_or_zero(box_of(pair, j) + kBoxBytes, from + 128, row >= 0);
            }
          }
          barrier_arrive_when_copied(full_of(pair));
        }
      }
      own.tell(shared, slot, present[slot]);
    };
#pragma unroll 1
    for (int block = begin; block < end; block += 2) {
      find_rows();
      bring.template operator()<0>(block);
      // Of the next items behind the tokens: the queries' place is free later than a slot.
      if (begun && block == begin) bring_queries();
      bring.template operator()<1>(block + 1);  // nothing behind an odd number of blocks
      phase ^= 1;
    }
  }
}

}  // namespace hypermla::cute::latent
