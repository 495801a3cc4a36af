// Keys and values of a prefix from its latents in the paged cache, for all heads (the up-projections of DeepSeek-V2,
// arXiv 2405.04434, section 2.1).
//
// A thread block makes 128 tokens of some heads. The latents of its tokens stay in shared memory; the weights pass by,
// 64 latent columns at a time. Blocks that run at once are of the same heads, so that these weights come from L2.
//
// Roles (352 threads):
//   warpgroups 0, 1   multiply (2 x 64 tokens, 128 columns): the keys, and the values. Values begin half a head later,
//                     so that one warpgroup multiplies while the other stores
//   warps 8, 9        one thread each loads the weights of warpgroup 0 or 1
//   warp 10           copies the rotary part to every head
//
// grid = tiles of tokens * parts of the heads; kPrefixSharedBytes of dynamic shared memory.
#pragma once

#include "cache_ops.h"
#include "hopper/constants.h"
#include "hopper/copies.h"
#include "hopper/fragments.h"
#include "hopper/gather.h"
#include "hopper/ring.h"
#include "hopper/rows.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "hopper/wgmma.h"

namespace hypermla::cute {

inline constexpr u32 kStepBytes = 2 * kBoxBytes;  // 64 latent columns of the weights of a head
inline constexpr int kTokensThere = 1;            // named barrier of both warpgroups

struct PrefixShared {
  Array<Array<Bytes<kBoxBytes>, kPrefixTokens / 64>, kPrefixSteps> tokens;  // [64 latent columns][64 tokens]
  Array<Array<Bytes<kStepBytes>, kPrefixStages>, 2> weights;                // of the keys, of the values
  RingBarriers<kPrefixStages, 2> rings;
  Barrier half_a_head;  // of keys is made
};
static_assert(sizeof(PrefixShared) == kPrefixSharedBytes && sizeof(PrefixShared) <= kMaxSharedBytes);

// Where a token's row begins in the cache; null where the table names no page of it.
__device__ __forceinline__ const unsigned short* row_of_token(const DecompressPrefixArguments& with, const void* data,
                                                              long long page_stride, long long token_stride,
                                                              int token) {
  const unsigned of_table = static_cast<unsigned>(token) / with.cache.page;
  const unsigned page = with.block_table[of_table];
  if (page >= with.cache.pages) return nullptr;
  return static_cast<const unsigned short*>(data) + page * page_stride +
         (token - of_table * with.cache.page) * token_stride;
}

// A warpgroup's product, keys (0) or values (1), of the tokens from first_token on and the heads [head, last_head).
template <DType dtype, Major major>
__device__ __forceinline__ void multiply(PrefixShared& shared, const DecompressPrefixArguments& with, int product,
                                         int first_token, int head, int last_head) {
  float acc[2][64];  // (64, 128) of the first and of the last 64 tokens
  Ring<kPrefixStages, 2> ring(shared.rings, Side::consumer, product);
  const DecompressPrefixArguments::Rows& out = with.out[product];
  const u32 tokens = operand_k_major(shared.tokens);
  const int first_row = (thread_id() >> 5 & 3) * 16 + (lane_id() >> 2);
  bool says_half = product == 0;
#pragma unroll 1
  for (; head < last_head; ++head) {
    int before = 0;
#pragma unroll
    for (int step = 0; step < kPrefixSteps; ++step) {
      ring.wait_until_full();
      const At<Bytes<kStepBytes>> box = shared.weights[product][ring.stage];
      const u32 weights = major == Major::k ? operand_k_major(box) : operand_mn_major(box);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          mma<dtype, 128, major>(acc[half], tokens + (2 * step + half) * kNextBox + 2 * i,
                                 weights + (major == Major::k ? 2 : 128) * i, step + i > 0);
      }
      mma_commit();
      if (step > 0) {  // the products of the step before have read their box
        mma_wait<1>();
        warp_arrive(ring.barriers.empty(product, before));
        if (step == kPrefixSteps / 2 && says_half) warp_arrive(shared.half_a_head);
      }
      before = ring.stage;
      ring.next();
    }
    mma_wait<0>();
    pin<64>(acc[0]);
    pin<64>(acc[1]);
    warp_arrive(ring.barriers.empty(product, before));
    says_half = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first_token + i / 2 * 64 + first_row + i % 2 * 8;
      store_row<dtype>(out.data + token * out.token_stride + head * out.head_stride, acc[i / 2], i % 2, 1.0f,
                       token < with.tokens);
    }
  }
}

template <DType dtype>
__global__ void __launch_bounds__(kPrefixThreads, 1)
    decompress_prefix(const __grid_constant__ DecompressPrefixArguments with) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  PrefixShared& shared = *reinterpret_cast<PrefixShared*>(dynamic);
  const int role = uniform(static_cast<int>(threadIdx.x >> 5)), lane = lane_id();
  const int tile = blockIdx.x % with.tiles, part = blockIdx.x / with.tiles;
  const int first_token = tile * kPrefixTokens;
  const int head = part * with.heads / with.parts, last_head = (part + 1) * with.heads / with.parts;
  if (threadIdx.x == 0) {
    shared.rings.init(1, 4);
    barrier_init(shared.half_a_head, 4);
    barrier_init_done();
  }
  __syncthreads();

  const CacheLayout& cache = with.cache;
  if (role < 8) {
    // Rows behind the last token are copies of it, and are not stored.
#pragma unroll 4
    for (int row = role; row < kPrefixTokens; row += 8) {
      const unsigned short* from = row_of_token(with, cache.latent, cache.latent_page_stride, cache.latent_token_stride,
                                                min(first_token + row, with.tokens - 1));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int columns = half * 32 + lane;  // 8 of them
        const u32 to = shared.tokens[columns / 8][row / 64] + swizzled(row % 64, columns % 8);
        if (from)
          copy_ahead(to, from + 8 * columns);
        else
          store_zeros(to);
      }
    }
    wait_for_copies();
    async_fence();
    named_sync(kTokensThere, 256);
    const int product = role / 4;
    if (with.latent_innermost[product])
      multiply<dtype, Major::k>(shared, with, product, first_token, head, last_head);
    else
      multiply<dtype, Major::mn>(shared, with, product, first_token, head, last_head);
  } else if (role < 10) {
    if (lane != 0) return;
    const int product = role - 8;
    const bool latent_innermost = with.latent_innermost[product];
    Ring<kPrefixStages, 2> ring(shared.rings, Side::producer, product);
    if (product == 1) barrier_wait(shared.half_a_head, 0);
#pragma unroll 1
    for (int h = head; h < last_head; ++h) {
#pragma unroll 1
      for (int step = 0; step < kPrefixSteps; ++step) {
        ring.wait_until_empty();
        barrier_expect(ring.full(), kStepBytes);
        tma_load(shared.weights[product][ring.stage], with.weights[product], latent_innermost ? 0 : 64 * step,
                 latent_innermost ? step : 0, h, ring.full());
        ring.next();
      }
    }
  } else if (with.k_rope.data) {
    constexpr int kRows = 16;  // of a lane, every fourth of 64; 8 columns of each
#pragma unroll 1
    for (int first = first_token; first < first_token + kPrefixTokens; first += 4 * kRows) {
      uint4 x[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const unsigned short* from = row_of_token(with, cache.rope, cache.rope_page_stride, cache.rope_token_stride,
                                                  min(first + 4 * i + lane / 8, with.tokens - 1));
        x[i] = from ? reinterpret_cast<const uint4*>(from)[lane % 8] : uint4{};
      }
#pragma unroll 1
      for (int h = head; h < last_head; ++h) {
        unsigned short* to = with.k_rope.data + h * with.k_rope.head_stride;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int token = first + 4 * i + lane / 8;
          if (token < with.tokens) reinterpret_cast<uint4*>(to + token * with.k_rope.token_stride)[lane % 8] = x[i];
        }
      }
    }
  }
}

}  // namespace hypermla::cute
