// Tokens in FP8, of sparse or dense attention, which two warpgroups of flash_mla.cuh widen to fp16 in shared memory,
// one for the blocks of each slot: so one waits for its tokens while the other widens.
//
// A token is 656 bytes in DeepSeek's form, 512 e4m3 | 4 fp32 scales, of 128 columns each | 64 bf16 of RoPE, or 576 e4m3
// with one scale for all. A pair of boxes is the 128 columns of a scale. Four threads share a token, and each has two:
// thread u brings bytes 16 u and 64 + 16 u of every pair, which are 16 columns of each of the two boxes, and holds the
// scale of pair u. It copies them to where 8 of these columns will lie and widens them there, so that nobody else waits
// for it, and the bytes on their way take no registers. As loads into registers they would not overlap: the assembler
// has them all count on one scoreboard, and whoever waits for the first waits for the last.
#pragma once

#include "hopper/copies.h"
#include "hopper/fp8.h"
#include "latent/gather_tokens.cuh"

namespace hypermla::cute::latent {

inline constexpr int kFp8Rows = 2;                      // of a thread, 8 apart
inline constexpr int kFp8Scales = 512, kFp8Rope = 528;  // bytes in a token of 656: 4 fp32, and 64 bf16
inline constexpr int kFp8NarrowRope = 512;              // of 576 bytes: where the e4m3 of RoPE begin
inline constexpr u32 kFp8NextRow = 8 * 128;             // bytes of a box

template <int n>
struct Constant {
  static constexpr int value = n;
};

template <int token_bytes, auto tiling, int slot>
__device__ __forceinline__ void gather_fp8(Shared& shared, const WorkItem* __restrict__ work,
                                           const LatentArguments& with) {
  constexpr bool one_scale = token_bytes == 576;
  const u32 thread = thread_id() & 127, lane = thread & 31, u = thread & 3;
  const u32 first_row = thread / 32 * 16 + thread / 4 % 8;
  const u32 to = shared.slots[slot] + first_row * 128 + ((2 * u ^ (first_row & 7)) << 4), to_half = to ^ 16;
  const unsigned char* __restrict__ from = static_cast<const unsigned char*>(with.z) + 16 * u;
  const float scale_of_all = one_scale ? __ldg(with.cache_scale) : 0;
  u32 phase = 1, queries_phase = 1;
  for (;; ++work) {
    const int begin = work->begin, end = work->end, tokens = work->tokens;
    if (begin == end) break;
    const int* __restrict__ table =
        with.block_table + static_cast<u64>(static_cast<u32>(work->request)) * static_cast<u32>(with.table_width);
    // Entries of the table for the next block. What is to be made of them is made where they are used: here it would
    // wait for them.
    int next[kFp8Rows];
    const auto token_of = [&](int block, int j) { return block * kTile + static_cast<int>(first_row) + 8 * j; };
    const auto read_entries = [&](int block) {
#pragma unroll
      for (int j = 0; j < kFp8Rows; ++j) {
        const int token = token_of(block, j);
        if (block < end && token < tokens) next[j] = table[with.page.divide(token)];
      }
    };
    read_entries(begin + slot);
    for (int block = begin + slot; block - slot < end; block += 2) {
      const bool has_block = slot == 0 || block < end;
      int place[kFp8Rows];  // of the token in the pool; -1: there is none
      const unsigned char* at[kFp8Rows];
      float scale[kFp8Rows];  // of a token of 656 bytes: that of pair u
#pragma unroll
      for (int j = 0; j < kFp8Rows; ++j) {
        const int token = token_of(block, j);
        place[j] = -1;
        if (has_block && token < tokens)
          place[j] = place_of(next[j] * with.page_places + token - with.page.divide(token) * with.page.by, with.tokens);
        at[j] = from + static_cast<u64>(static_cast<u32>(max(place[j], 0))) * static_cast<u32>(with.z_stride);
      }
      read_entries(block + 2);
#pragma unroll
      for (int j = 0; j < kFp8Rows && !one_scale; ++j)
        scale[j] = place[j] >= 0 ? __ldg(reinterpret_cast<const float*>(at[j] + kFp8Scales - 12 * u)) : 0;
      // Bit 8 (r % 4) + r / 4 says whether row r of the warp's 16 is there: r % 8 is a group of four threads.
      const int r = lane / 8 + 4 * (lane & 3);
      const int first = __shfl_sync(~0u, place[0], r % 8 * 4), second = __shfl_sync(~0u, place[1], r % 8 * 4);
      const u32 present = __ballot_sync(~0u, (lane & 7) < 4 && (r < 8 ? first : second) >= 0);
      const auto copy = [&](int j, u32 offset, int bytes) {
        if (has_block) copy_ahead_or_zero(to + j * kFp8NextRow + offset, at[j] + bytes, place[j] >= 0);
      };
#pragma unroll
      for (int i = 0; i < kRope; ++i) {
        const int pair = order_of_release(slot, i);
        barrier_wait(shared.empty[slot][pair], phase);
#pragma unroll
        for (int j = 0; j < kFp8Rows; ++j)
#pragma unroll
          for (int box = 0; box < 2; ++box) copy(j, (2 * pair + box) * kBoxBytes, pair * 128 + box * 64);
        commit_copies();
      }
      barrier_wait(shared.empty[slot][kRope], phase);
#pragma unroll
      for (int j = 0; j < kFp8Rows; ++j) {
        copy(j, 8 * kBoxBytes, one_scale ? kFp8NarrowRope : kFp8Rope + 16 * int(u));
        if (!one_scale && has_block)
          copy_ahead_or_zero(to_half + j * kFp8NextRow + 8 * kBoxBytes, at[j] + kFp8Rope + 16 * u + 16, place[j] >= 0);
      }
      commit_copies();
      if (slot == 0 && block == begin && thread == 0) {
        barrier_wait(shared.queries_empty, queries_phase);
        load_queries<tiling>(shared, *work, with);
      }
      __syncwarp();

      // 16 bytes where they lie, to the columns that they are.
      const auto raw_at = [&](int j, int box) { return load_shared(to + j * kFp8NextRow + box * kBoxBytes); };
      const auto widen = [&](int j, int box, uint4 raw, HalfFactor by) {
        const u32 line = j * kFp8NextRow + box * kBoxBytes;
        store_line(to + line, widen_e4m3(raw.x, raw.y, by));
        store_line(to_half + line, widen_e4m3(raw.z, raw.w, by));
      };
      const auto widen_pair = [&](auto turn) {
        constexpr int i = decltype(turn)::value, pair = order_of_release(slot, i);
        wait_for_copies<kRope - i>();
        if (has_block) {
#pragma unroll
          for (int j = 0; j < kFp8Rows; ++j) {
            const HalfFactor by(one_scale ? scale_of_all : __shfl_sync(~0u, scale[j], (lane & 28) + pair));
            const uint4 raw = raw_at(j, 2 * pair), behind = raw_at(j, 2 * pair + 1);  // a load is some 30 cycles
            widen(j, 2 * pair, raw, by);
            widen(j, 2 * pair + 1, behind, by);
          }
        }
        barrier_arrive(shared.full[slot][pair]);
      };
      widen_pair(Constant<0>{});
      widen_pair(Constant<1>{});
      widen_pair(Constant<2>{});
      widen_pair(Constant<3>{});
      wait_for_copies<0>();
      if (has_block) {
        if constexpr (one_scale) {
          const uint4 raw[] = {raw_at(0, 8), raw_at(1, 8)};
#pragma unroll
          for (int j = 0; j < kFp8Rows; ++j) widen(j, 8, raw[j], HalfFactor(scale_of_all));
        } else {
#pragma unroll
          for (int j = 0; j < kFp8Rows; ++j) {
            const u32 line = j * kFp8NextRow + 8 * kBoxBytes;
            const uint4 raw = load_shared(to + line), behind = load_shared(to_half + line);
            store_line(to + line, halves_of_bf16(raw));
            store_line(to_half + line, halves_of_bf16(behind));
          }
        }
      }
      barrier_arrive(shared.full[slot][kRope]);
      if (lane == 0) {
        *const_cast<volatile u32*>(&shared.present[slot][thread / 32]) = present;
        barrier_arrive(shared.full[slot][kRope]);
      }
      __syncwarp();
      phase ^= 1;
    }
    queries_phase ^= 1;
  }
}

}  // namespace hypermla::cute::latent
