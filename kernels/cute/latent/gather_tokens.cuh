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

inline constexpr int kGatherRows = 4;            // of a thread, 4 apart
inline constexpr int kGatherArrivals = 128 + 4;  // at a RoPE box: all threads, and each warp for its present rows
inline constexpr int kFp8Scales = 512, kFp8Rope = 528;  // bytes in a token of 656: 4 fp32, and 64 bf16

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
  __device__ __forceinline__ void tell(Shared& shared, int slot, u32 present) const {
    if (lane_id() == 0) {
      *const_cast<volatile u32*>(&shared.present[slot][thread / 32]) = present;
      barrier_arrive(shared.full[slot][kRope]);
    }
  }
};

// An entry of the table, -1 for what is no token. Not where it is read: that would wait for it.
__device__ __forceinline__ int place_of(int entry, unsigned tokens) {
  return static_cast<unsigned>(entry) < tokens ? entry : -1;
}

// As copy_ahead(), or zeros.
__device__ __forceinline__ void copy_or_zero(u32 shared, const void* global, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(exists ? 16 : 0));
}

__device__ __forceinline__ void store_shared(u32 shared, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// Tokens in the type of the queries.
template <auto tiling>
__device__ __forceinline__ void gather(Shared& shared, const WorkItem* __restrict__ work, const LatentArguments& with) {
  const GatherThread own;
  const u32 first_row = own.first_row();
  const u32 to = shared.slots[0] + first_row * 128 + ((own.unit() ^ (first_row & 3)) << 4);
  const unsigned char* __restrict__ z = static_cast<const unsigned char*>(with.z) + own.unit() * 16;
  const unsigned char* __restrict__ kpe = static_cast<const unsigned char*>(with.kpe) + own.unit() * 16;
  u32 phase = 1, queries_phase = 1;
  for (;; ++work) {
    const int begin = work->begin, end = work->end, tokens = work->tokens;
    if (begin == end) break;
    const int* __restrict__ table = with.block_table + static_cast<long long>(work->request) * with.table_width;
    int place[kGatherRows], next[kGatherRows];  // rows of the pool, for this block and the next; -1: none
    auto read_places = [&](int block) {
#pragma unroll
      for (int j = 0; j < kGatherRows; ++j) {
        const int token = block * kTile + static_cast<int>(first_row) + 4 * j;
        next[j] = block < end && token < tokens ? table[token] : -1;
      }
    };
    read_places(begin);
    for (int block = begin; block < end || ((block - begin) & 1); ++block) {
      const int slot = (block - begin) & 1;
#pragma unroll
      for (int j = 0; j < kGatherRows; ++j) place[j] = place_of(next[j], with.tokens);
      read_places(block + 1);
      const u32 present = own.present(place);
      // Whether the next pair is free is asked before the copies of this one.
      bool is_free = barrier_test(shared.empty[slot][0], phase);
#pragma unroll
      for (int i = 0; i < kBoxPairs; ++i) {
        const int pair = order_of_release(slot, i);
        if (!is_free) barrier_wait(shared.empty[slot][pair], phase);
        if (i + 1 < kBoxPairs) is_free = barrier_test(shared.empty[slot][order_of_release(slot, i + 1)], phase);
        // Row and row + 4 lie 512 bytes apart, and by the swizzle bit 6 of their units differs.
        const auto box_of = [&](int j) {
          return ((to + slot * kOperandBytes) ^ (j & 1) << 6) + 2 * pair * kBoxBytes + j * 512;
        };
        if (present == kAllPresent) {
#pragma unroll
          for (int j = 0; j < kGatherRows; ++j) {
            if (i == kRope) {
              copy_ahead(box_of(j), kpe + static_cast<long long>(place[j]) * with.kpe_stride);
            } else {
              const unsigned char* from = z + static_cast<long long>(place[j]) * with.z_stride + pair * 256;
              copy_ahead(box_of(j), from);
              copy_ahead(box_of(j) + kBoxBytes, from + 128);
            }
          }
        } else if (block < end) {
#pragma unroll 1
          for (int j = 0; j < kGatherRows; ++j) {
            const int row = j & 2 ? (j & 1 ? place[3] : place[2]) : j & 1 ? place[1] : place[0];
            if (i == kRope) {
              copy_or_zero(box_of(j), kpe + max(row, 0) * static_cast<long long>(with.kpe_stride), row >= 0);
            } else {
              const unsigned char* from = z + max(row, 0) * static_cast<long long>(with.z_stride) + pair * 256;
              copy_or_zero(box_of(j), from, row >= 0);
              copy_or_zero(box_of(j) + kBoxBytes, from + 128, row >= 0);
            }
          }
        }
        barrier_arrive_when_copied(shared.full[slot][pair]);
      }
      own.tell(shared, slot, present);
      if (block == begin && (thread_id() & 127) == 0) {
        barrier_wait(shared.queries_empty, queries_phase);
        queries_phase ^= 1;
        load_queries<tiling>(shared, *work, with);
      }
      __syncwarp();
      if (slot) phase ^= 1;
    }
  }
}

// 8 e4m3 times a scale, as bf16.
__device__ __forceinline__ uint4 widen(u32 first, u32 second, float scale) {
  const auto four = [scale](u32 word, u32& low, u32& high) {
    u32 a, b;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(a), "=r"(b)
        : "r"(word));
    const float2 x = unpack<DType::float16>(a), y = unpack<DType::float16>(b);
    low = pack<DType::bfloat16>(x.x * scale, x.y * scale);
    high = pack<DType::bfloat16>(y.x * scale, y.y * scale);
  };
  uint4 out;
  four(first, out.x, out.y);
  four(second, out.z, out.w);
  return out;
}

// 16 bytes that are read once.
__device__ __forceinline__ uint4 load_once(const unsigned char* from, bool wanted) {
  uint4 x = {};
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
      : "l"(from), "r"(static_cast<int>(wanted)));
  return x;
}

// Tokens of 656 bytes in DeepSeek's FP8 form: 512 e4m3 | 4 fp32 scales, of 128 columns each | 64 bf16 for RoPE. A pair
// of boxes is the 128 columns of a scale. They are widened to bf16 on the way. Loads run two pairs ahead, over the ends
// of blocks and items; a lane holds two of the 16 scales of its four rows. The readers fence: here a fence would wait
// for the loads.
template <auto tiling>
__device__ __forceinline__ void gather_fp8(Shared& shared, const WorkItem* __restrict__ work,
                                           const LatentArguments& with) {
  constexpr int kAhead = 2, kPairs = 4;
  const GatherThread own;
  // 16 columns are two units of a box's row. Lanes of the second box store theirs the other way round: else two lanes
  // would meet in every bank.
  const u32 turned = own.unit() / 4;
  const u32 to = shared.slots[0] + own.first_row() * 128 + turned * kBoxBytes +
                 (((own.unit() % 4 * 2 + turned) ^ (own.first_row() & 3)) << 4);

  // The blocks of all items, one after the other.
  struct Position {
    int item, block, end;
    int slot;  // of the block: 0 for the first of an item; a block 1 may lie behind its end
    bool begins;
  };
  if (work->begin == work->end) return;
  Position at = {0, work->begin, work->end, 0, true};
  const auto advance = [&](Position& to) {
    ++to.block;
    to.slot ^= 1;
    to.begins = to.slot == 0 && to.block >= to.end;
    if (!to.begins) return;
    ++to.item;
    to.block = work[to.item].begin;
    to.end = work[to.item].end;
  };
  int place[kGatherRows], next[kGatherRows];
  float2 scales;  // of row unit % 4, of the pairs unit / 4 * 2 and the one after it
  const auto read_places = [&](const Position& of) {
    const bool exists = of.block < of.end;
    const int* __restrict__ table = with.block_table + static_cast<u64>(static_cast<u32>(work[of.item].request)) *
                                                           static_cast<u32>(with.table_width);
    const int tokens = work[of.item].tokens;
#pragma unroll
    for (int j = 0; j < kGatherRows; ++j) {
      const int token = of.block * kTile + static_cast<int>(own.first_row()) + 4 * j;
      next[j] = exists && token < tokens ? table[token] : -1;
    }
  };
  const auto row_at = [&](int place) {
    return static_cast<const unsigned char*>(with.z) +
           static_cast<u64>(static_cast<u32>(place)) * static_cast<u32>(with.z_stride);
  };
  const auto read_scales = [&] {  // of the rows `next`
    const int row = own.of_lane(next);
    scales = {};
    if (static_cast<u32>(row) < with.tokens)
      scales = __ldg(reinterpret_cast<const float2*>(row_at(row) + kFp8Scales) + own.unit() / 4);
  };
  uint4 raw[kAhead][kGatherRows];
  const auto load = [&](uint4(&to)[kGatherRows], const int(&rows)[kGatherRows], int pair) {
#pragma unroll
    for (int j = 0; j < kGatherRows; ++j)
      to[j] = load_once(row_at(rows[j]) + pair * 128 + own.unit() * 16, static_cast<u32>(rows[j]) < with.tokens);
  };

  read_places(at);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(raw[i], next, i);  // an item begins with slot 0
  read_scales();
  u32 phase = 1;
  for (;;) {
    const int slot = at.slot, item = at.item;
    const bool exists = at.block < at.end, is_first = at.begins;
#pragma unroll
    for (int j = 0; j < kGatherRows; ++j) place[j] = place_of(next[j], with.tokens);
    advance(at);
    const bool is_last = at.begins && at.block == at.end;
    read_places(at);  // none behind the last item
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = order_of_release(slot, i);
      barrier_wait(shared.empty[slot][pair], phase);
      uint4(&words)[kGatherRows] = raw[i % kAhead];
      if (exists) {
        const float own_scale = pair & 1 ? scales.y : scales.x;
#pragma unroll
        for (int j = 0; j < kGatherRows; ++j) {
          const float scale = __shfl_sync(~0u, own_scale, (lane_id() & 24) + pair / 2 * 4 + j);
          const uint4 x = words[j];
          const u32 first = ((to + slot * kOperandBytes) ^ (j & 1) << 6) + 2 * pair * kBoxBytes + j * 512;
          store_shared(first, widen(turned ? x.z : x.x, turned ? x.w : x.y, scale));
          store_shared(first ^ 16, widen(turned ? x.x : x.z, turned ? x.y : x.w, scale));
        }
      }
      barrier_arrive(shared.full[slot][pair]);
      if (i + kAhead < kPairs)
        load(words, place, order_of_release(slot, i + kAhead));
      else
        load(words, next, order_of_release(at.slot, i + kAhead - kPairs));
    }
    barrier_wait(shared.empty[slot][kRope], phase);
    if (exists) {
#pragma unroll
      for (int j = 0; j < kGatherRows; ++j) {
        const u32 box = shared.slots[slot] + 8 * kBoxBytes + swizzled(own.first_row() + 4 * j, own.unit());
        copy_or_zero(box, row_at(max(place[j], 0)) + kFp8Rope + own.unit() * 16, place[j] >= 0);
      }
    }
    barrier_arrive_when_copied(shared.full[slot][kRope]);
    read_scales();
    own.tell(shared, slot, own.present(place));
    if (is_first && (thread_id() & 127) == 0) {
      barrier_wait(shared.queries_empty, ~item & 1);
      load_queries<tiling>(shared, work[item], with);
    }
    __syncwarp();
    if (slot) phase ^= 1;
    if (is_last) break;
  }
}

}  // namespace hypermla::cute::latent
