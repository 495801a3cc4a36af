// Tokens in FP8, of sparse or dense attention, which two warpgroups of flash_mla.cuh widen to fp16 on the way to
// shared memory.
//
// A token is 656 bytes in DeepSeek's form, 512 e4m3 | 4 fp32 scales, of 128 columns each | 64 bf16 of RoPE, or 576 e4m3
// with one scale for all. A pair of boxes is the 128 columns of a scale. Four threads share a token: thread u brings
// bytes 16 u and 64 + 16 u of every pair, which are 16 columns of each of the two boxes, and holds the scale of pair u.
// Eight warps, so that one widens while another waits. Loads run two pairs ahead, over the ends of blocks and items.
// The readers fence: here a fence would wait for the loads.
#pragma once

#include "hopper/copies.h"
#include "hopper/fp8.h"
#include "latent/gather_tokens.cuh"

namespace hypermla::cute::latent {

inline constexpr int kFp8Threads = 256;
inline constexpr int kFp8Scales = 512, kFp8Rope = 528;  // bytes in a token of 656: 4 fp32, and 64 bf16
inline constexpr int kFp8NarrowRope = 512;              // of 576 bytes: where the e4m3 of RoPE begin

template <int n>
struct Constant {
  static constexpr int value = n;
};

template <int token_bytes, auto tiling>
__device__ __forceinline__ void gather_fp8(Shared& shared, const WorkItem* __restrict__ work,
                                           const LatentArguments& with) {
  constexpr int kAhead = 2, kPairs = 4, kBoxes = 2;
  constexpr bool one_scale = token_bytes == 576;
  // Groups of four threads and rows: what a warp has of a word of Present are two whole bytes (mask_absent()).
  const u32 u = thread_id() & 3, group = thread_id() / 4 & 7, warp = thread_id() / 32 & 7;
  const u32 row = warp / 2 * 16 + group / 2 * 4 + (warp & 1) * 2 + (group & 1);
  const u32 to = shared.slots[0] + row * 128 + ((2 * u ^ (row & 7)) << 4), to_half = to ^ 16;
  const unsigned char* from = static_cast<const unsigned char*>(with.z) + 16 * u;
  asm volatile("" : "+l"(from));  // else sums of what is known of it and of the pair take registers

  // The blocks of all items, one after the other.
  if (work->begin == work->end) return;
  u32 item = 0;
  int block = work->begin, end = work->end;
  int place, next;  // of the thread's row in the pool, for this block and the next; -1: none
  float scale = one_scale ? __ldg(with.cache_scale) : 0;
  const auto exists = [&](int place) { return static_cast<u32>(place) < with.tokens; };
  const auto at_row = [&](int place) {
    return from + static_cast<u64>(static_cast<u32>(place)) * static_cast<u32>(with.z_stride);
  };
  const auto read_place = [&] {
    const WorkItem& of = work[item];
    const int* __restrict__ table =
        with.block_table + static_cast<u64>(static_cast<u32>(of.request)) * static_cast<u32>(with.table_width);
    const int token = block * kTile + static_cast<int>((to - shared.slots[0]) / 128);
    next = -1;
    if (block < end && token < of.tokens) {
      const u32 page = with.page.divide(token);
      next = table[page] * with.page_places + (token - page * with.page.by);
    }
  };
  const auto read_scale = [&] {  // of the row `next`
    if (one_scale) return;
    scale = exists(next) ? __ldg(reinterpret_cast<const float*>(at_row(next) + kFp8Scales - 12 * (lane_id() & 3))) : 0;
  };
  uint4 raw[kAhead][kBoxes], rope;
  const auto load = [&](uint4(&to)[kBoxes], int place, int pair) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      to[box] = load_in_place(at_row(place) + pair * 128 + box * 64, exists(place));
  };

  read_place();
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(raw[i], next, i);  // an item begins with slot 0
  read_scale();
  u32 phase = 1;
  const auto bring = [&](auto of_slot) {
    constexpr int slot = decltype(of_slot)::value;
    constexpr u32 rope_at = slot * kOperandBytes + 8 * kBoxBytes;
    const bool has_block = slot == 0 || block < end;
    place = place_of(next, with.tokens);
    // The next block. The last of an odd number of blocks has an empty one behind it.
    ++block;
    if (slot == 1 && block >= end) {
      ++item;
      block = work[item].begin;
      end = work[item].end;
    }
    read_place();  // none behind the last item
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = order_of_release(slot, i);
      barrier_wait(shared.empty[slot][pair], phase);
      uint4(&words)[kBoxes] = raw[i % kAhead];
      if (has_block) {
        const HalfFactor of_pair(one_scale ? scale : __shfl_sync(~0u, scale, (lane_id() & 28) + pair));
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          const u32 at = slot * kOperandBytes + (2 * pair + box) * kBoxBytes;
          store_line(to + at, widen_e4m3(words[box].x, words[box].y, of_pair));
          store_line(to_half + at, widen_e4m3(words[box].z, words[box].w, of_pair));
        }
      }
      barrier_arrive(shared.full[slot][pair]);
      if (one_scale && i == 1) rope = load_in_place(at_row(place) + kFp8NarrowRope, place >= 0);
      if (!one_scale && i == 1) {
        barrier_wait(shared.empty[slot][kRope], phase);
        if (has_block) {  // as it is; it is halved where it lies, by the thread that has copied it
          const unsigned char* const from_rope = at_row(max(place, 0)) + kFp8Rope + 16 * (lane_id() & 3);
          copy_ahead_or_zero(to + rope_at, from_rope, place >= 0);
          copy_ahead_or_zero(to_half + rope_at, from_rope + 16, place >= 0);
        }
      }
      if (i + kAhead < kPairs)
        load(words, place, order_of_release(slot, i + kAhead));
      else
        load(words, next, order_of_release(1 - slot, i + kAhead - kPairs));
    }
    if (one_scale) {
      barrier_wait(shared.empty[slot][kRope], phase);
      if (has_block) {
        const HalfFactor of_all(scale);
        store_line(to + rope_at, widen_e4m3(rope.x, rope.y, of_all));
        store_line(to_half + rope_at, widen_e4m3(rope.z, rope.w, of_all));
      }
    } else {
      if (has_block) {
        wait_for_copies();
        store_line(to + rope_at, halves_of_bf16(load_shared(to + rope_at)));
        store_line(to_half + rope_at, halves_of_bf16(load_shared(to_half + rope_at)));
      }
      read_scale();
    }
    barrier_arrive(shared.full[slot][kRope]);
    // Bit 8 (r % 4) + r / 4 of a word says whether row r of its 16 is there: lane l asks group 2 (l % 8) + l / 8.
    const int of_group = __shfl_sync(~0u, place, (8 * lane_id() + lane_id() / 8 * 4) & 31);
    const u32 present = __ballot_sync(~0u, of_group >= 0) & 0xf0f;
    if (lane_id() == 0) {
      auto* const words = reinterpret_cast<volatile unsigned short*>(shared.present[slot]);
      words[thread_id() / 32 & 7] = static_cast<unsigned short>(present);
      barrier_arrive(shared.full[slot][kRope]);
    }
    if (slot == 0 && thread_id() == 256 && block - 1 == work[item].begin) {
      barrier_wait(shared.queries_empty, ~item & 1);
      load_queries<tiling>(shared, work[item], with);
    }
    __syncwarp();
  };
  do {
    bring(Constant<0>{});
    bring(Constant<1>{});
    phase ^= 1;
  } while (block < end);
}

}  // namespace hypermla::cute::latent
