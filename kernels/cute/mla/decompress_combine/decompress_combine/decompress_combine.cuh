// The last step of an attention in parts (split tokens: Flash-Decoding; two kinds of tokens: the hybrid) on Hopper. The
// parts of a row are weighted by their log-sum-exp. The latent ones go through the value projection of their head
// (DeepSeek-V2, arXiv 2405.04434). The output is the sum. Memory bounds this step: every part is read once, and the
// matrix of a head stays in shared memory while its rows, b * s of them, pass by.
//
// A tile is Bs queries of Bb requests, 64 rows at most, of one head: one box of the copy engine for every 64 columns.
//
// Roles (320 threads). Two consumers take the tiles of the thread block in turns and share only the matrix, so that one
// loads and multiplies while the other stores.
//   warpgroups 0, 1   consumers: weights, products (64 x 128 x 16), sums, outputs
//   warps 8, 9        producers: one thread each loads the rows of consumer 0 or 1; that of consumer 0 the matrix, too
//
// Order of a tile's boxes: 64 latent columns of every latent part, the next 64, ...; then the decompressed parts. One
// latent part alone is multiplied from shared memory and its rows are weighted afterwards. Several are weighted and
// added up in registers, and multiplied from there. The outputs leave through the last two boxes of their tile.
//
// Rows that do not exist, and those of empty parts, may hold anything: every row of a product depends on its own row
// only, and an output of weight 0 is left out.
//
// Shared memory (struct Shared; 1024-byte aligned, boxes of 64 columns with the 128-byte swizzle): the matrix, 8 x
// 16 KiB | 2 rings of 6 x 8 KiB | barriers.
//
// grid = blocks per head * h; 320 threads, kDecompressCombineSharedBytes of dynamic shared memory. Launched
// programmatically: it reads the matrix at once, and waits for the kernel before it with everything else. So w may not
// be that kernel's output.
#pragma once

#include "decompress_combine.h"
#include "hopper/constants.h"
#include "hopper/fragments.h"
#include "hopper/mbarrier.h"
#include "hopper/ring.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "hopper/wgmma.h"

namespace hypermla::cute {

inline constexpr int kTileRows = kDecompressCombineRows, kSteps = 8, kStages = 6;  // kSteps: of 64 latent columns
inline constexpr u32 kMatrixStepBytes = 2 * kBoxBytes;                             // 64 latent columns of the matrix

struct Shared {
  Array<Bytes<kMatrixStepBytes>, kSteps> matrix;
  Array<Array<Bytes<kBoxBytes>, kStages>, 2> boxes;  // [consumer]
  Barriers<kSteps> matrix_full;
  RingBarriers<kStages, 2> rings;
};
static_assert(sizeof(Shared) == kDecompressCombineSharedBytes && sizeof(Shared) <= kMaxSharedBytes);

// Logarithms of sums, added up.
struct LogSum {
  float top = kLeastScore, total = 0.0f;
  __device__ __forceinline__ void add(float log2) {
    const float raised = fmaxf(top, log2);
    total = total * exp2_fast(top - raised) + exp2_fast(log2 - raised);
    top = raised;
  }
  __device__ __forceinline__ float log2() const { return total == 0.0f ? -kInfinity : top + log2_fast(total); }
  __device__ __forceinline__ float share(float log2) const {
    return total == 0.0f ? 0.0f : __fdividef(exp2_fast(log2 - top), total);
  }
};

// Two 16-bit elements to fp32; zeros for a weight of 0, even if they are NaN.
template <DType dtype>
__device__ __forceinline__ float2 unpack(u32 packed, float weight) {
  return cute::unpack<dtype>(weight > 0.0f ? packed : 0);
}

// One warpgroup: every second tile of the thread block, from `tile` on.
template <CombineProblem problem>
__device__ __forceinline__ void combine(Shared& shared, int consumer, const CombineRows rows, int head, int tile,
                                        int tile_step, const float* lse_latent, const float* lse_decompressed,
                                        const TensorMap& o_map, float* __restrict__ lse) {
  constexpr DType dtype = problem.dtype;
  float acc[64];  // (64, 128): acc[4i], acc[4i + 1] columns 8i + 2 (lane % 4) of row r, then of row r + 8
  Ring<kStages, 2> ring(shared.rings, Side::consumer, consumer);
  const int lane = lane_id(), warp = (thread_id() >> 5) & 3;
  const int first_row = warp * 16 + lane / 4;  // r; the other half of this thread's elements are of row r + 8
  int request_in_tile[2], query_in_tile[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    request_in_tile[half] = (first_row + 8 * half) / rows.Bs;
    query_in_tile[half] = (first_row + 8 * half) % rows.Bs;
  }
  const long long part_rows = static_cast<long long>(rows.b) * rows.h * rows.s;
  auto meet = [&] { named_sync(1 + consumer, 128); };
  auto release = [&](int stage) {
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.barriers.empty(consumer, stage));
  };
  // A fragment's place in a box: row l % 16 of the warp, columns 8 * (l / 16) and on of each 16.
  const u32 fragment_row = (warp * 16 + (lane & 15)) * 128, swizzle = lane & 7, unit = lane >> 4;
  auto fragment = [&](int stage, int columns16) {
    return shared.boxes[consumer][stage] + fragment_row + (((2 * columns16 + unit) ^ swizzle) << 4);
  };
  const u32 matrix = operand_mn_major(shared.matrix);

  wait_for_previous();
#pragma unroll 1
  for (; tile < rows.tiles; tile += tile_step) {
    const int query = tile % rows.query_tiles * rows.Bs, request = tile / rows.query_tiles * rows.Bb;
    bool exists[2];
    long long row[2];  // of [B, H, S]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q = query + query_in_tile[half], r = request + request_in_tile[half];
      exists[half] = request_in_tile[half] < rows.Bb && r < rows.b && q < rows.s;
      row[half] = exists[half] ? (static_cast<long long>(r) * rows.h + head) * rows.s + q : 0;
    }
    // Logarithm (base 2) of a part's sum; the same four threads of a warp read the same row.
    auto part_log2 = [&](const float* of, int part, int half) {
      return exists[half] ? __ldcg(of + part * part_rows + row[half]) * kLog2e : -kInfinity;
    };

    LogSum latent[2], all[2];
    if constexpr (problem.latent_parts > 0) {
#pragma unroll 2
      for (int part = 0; part < rows.latent_parts; ++part)
#pragma unroll
        for (int half = 0; half < 2; ++half) latent[half].add(part_log2(lse_latent, part, half));
    }
    const float latent_log2[2] = {latent[0].log2(), latent[1].log2()};
#pragma unroll
    for (int half = 0; half < 2; ++half) all[half].add(latent_log2[half]);
#pragma unroll 2
    for (int part = 0; part < rows.decompressed_parts; ++part)
#pragma unroll
      for (int half = 0; half < 2; ++half) all[half].add(part_log2(lse_decompressed, part, half));

    // The last two boxes stay until the outputs have left.
    const bool latent_boxes_stay = rows.decompressed_parts == 0;
    if constexpr (problem.latent_parts == 1) {
      int before = 0;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        barrier_wait(shared.matrix_full[step], 0);  // passed at once from the second tile on
        ring.wait_until_full();
        const u32 a = operand_k_major(shared.boxes[consumer][ring.stage]);
        mma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
          mma<dtype, 128, Major::mn>(acc, a + 2 * i, matrix + step * (kMatrixStepBytes >> 4) + 128 * i, step + i > 0);
        mma_commit();
        if (step > 0) {  // the products of the step before have read their box
          mma_wait<1>();
          if (step < kSteps - 1 || !latent_boxes_stay) release(before);
        }
        before = ring.stage;
        ring.next();
      }
      mma_wait<0>();
      pin<64>(acc);
      if (!latent_boxes_stay) release(before);
    } else if constexpr (problem.latent_parts > 1) {
      u32 a[16];
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        float sum[32] = {};
#pragma unroll 1
        for (int part = 0; part < rows.latent_parts; ++part) {
          const float part0 = part_log2(lse_latent, part, 0), part1 = part_log2(lse_latent, part, 1);
          ring.wait_until_full();
          const float weight0 = latent[0].share(part0), weight1 = latent[1].share(part1);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            u32 x[4];
            load_matrices(x, fragment(ring.stage, i));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const float weight = j % 2 ? weight1 : weight0;
              const float2 value = unpack<dtype>(x[j], weight);
              sum[8 * i + 2 * j] = fmaf(weight, value.x, sum[8 * i + 2 * j]);
              sum[8 * i + 2 * j + 1] = fmaf(weight, value.y, sum[8 * i + 2 * j + 1]);
            }
          }
          if (step < kSteps - 1 || part < rows.latent_parts - 2 || !latent_boxes_stay) release(ring.stage);
          ring.next();
        }
        barrier_wait(shared.matrix_full[step], 0);
        mma_wait<0>();  // the products of the step before have read their fragments
        pin<64>(acc);
#pragma unroll
        for (int i = 0; i < 16; ++i) a[i] = pack<dtype>(sum[2 * i], sum[2 * i + 1]);
        mma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
          mma<dtype, 128, Major::mn>(acc, a + 4 * i, matrix + step * (kMatrixStepBytes >> 4) + 128 * i, step + i > 0);
        mma_commit();
      }
      mma_wait<0>();
      pin<64>(acc);
    }

    const float share0 = all[0].share(latent_log2[0]), share1 = all[1].share(latent_log2[1]);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if constexpr (problem.latent_parts > 0) {
        acc[4 * i] = share0 > 0.0f ? share0 * acc[4 * i] : 0.0f;
        acc[4 * i + 1] = share0 > 0.0f ? share0 * acc[4 * i + 1] : 0.0f;
        acc[4 * i + 2] = share1 > 0.0f ? share1 * acc[4 * i + 2] : 0.0f;
        acc[4 * i + 3] = share1 > 0.0f ? share1 * acc[4 * i + 3] : 0.0f;
      } else {
        acc[4 * i] = acc[4 * i + 1] = acc[4 * i + 2] = acc[4 * i + 3] = 0.0f;
      }
    }
#pragma unroll 1
    for (int part = 0; part < rows.decompressed_parts; ++part) {
      const float weight0 = all[0].share(part_log2(lse_decompressed, part, 0));
      const float weight1 = all[1].share(part_log2(lse_decompressed, part, 1));
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        ring.wait_until_full();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          u32 x[4];
          load_matrices(x, fragment(ring.stage, i));
          float* to = acc + 32 * box + 8 * i;  // 16 columns; x[2j] and x[2j + 1]: 8 of them, rows r and r + 8
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float weight = j % 2 ? weight1 : weight0;
            const float2 value = unpack<dtype>(x[j], weight);
            to[2 * j] = fmaf(weight, value.x, to[2 * j]);
            to[2 * j + 1] = fmaf(weight, value.y, to[2 * j + 1]);
          }
        }
        if (part < rows.decompressed_parts - 1) release(ring.stage);
        ring.next();
      }
    }

    if (latent_boxes_stay) meet();  // the products of the other warps have read them, too
    const int out[2] = {(ring.stage + kStages - 2) % kStages, (ring.stage + kStages - 1) % kStages};
#pragma unroll
    for (int box = 0; box < 2; ++box) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* from = acc + 32 * box + 8 * i;
        store_matrices(fragment(out[box], i), pack<dtype>(from[0], from[1]), pack<dtype>(from[2], from[3]),
                       pack<dtype>(from[4], from[5]), pack<dtype>(from[6], from[7]));
      }
    }
    async_fence();
    meet();
    if (warp == 0 && lane == 0) {
      for (int box = 0; box < 2; ++box)
        tma_store(o_map, shared.boxes[consumer][out[box]], query, head * rows.head_groups + box, request);
      tma_store_read_wait();
    }
    release(out[0]);
    release(out[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if ((lane & 3) == 0 && exists[half]) lse[row[half]] = all[half].log2() * kLn2;
  }
  if (warp == 0 && lane == 0) tma_store_wait();
}

// The thread that loads the rows of a consumer.
template <CombineProblem problem, Keep keep>
__device__ __forceinline__ void load_rows(Shared& shared, int consumer, const CombineRows rows, int head, int tile,
                                          int tile_step, const TensorMap& latent_map,
                                          const TensorMap& decompressed_map) {
  Ring<kStages, 2> ring(shared.rings, Side::producer, consumer);
  const u32 box_bytes = rows.Bs * rows.Bb * 128;
  auto load = [&](const TensorMap& map, int query, int request, int group) {
    ring.wait_until_empty();
    barrier_expect(ring.full(), box_bytes);
    tma_load<keep>(shared.boxes[consumer][ring.stage], map, query, group, request, ring.full());
    ring.next();
  };
  for (; tile < rows.tiles; tile += tile_step) {
    const int query = tile % rows.query_tiles * rows.Bs, request = tile / rows.query_tiles * rows.Bb;
    if constexpr (problem.latent_parts > 0) {
      for (int step = 0; step < kSteps; ++step)
        for (int part = 0; part < rows.latent_parts; ++part)
          load(latent_map, query, part * rows.b + request, head * rows.s * kSteps + step);
    }
    for (int part = 0; part < rows.decompressed_parts; ++part)
      for (int box = 0; box < 2; ++box) load(decompressed_map, query, part * rows.b + request, head * rows.s * 2 + box);
  }
}

template <CombineProblem problem, DecompressCombineTiling tiling>
__global__ void __launch_bounds__(kDecompressCombineThreads, 1)
    decompress_combine(const __grid_constant__ DecompressCombineArguments with) {
  static_assert(problem.d == 128 && problem.k == 512, "the layouts are made for 512 latent and 128 output columns");
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const int role = uniform(static_cast<int>(threadIdx.x >> 5));
  const int consumer = role < 8 ? role / 4 : role - 8;
  const CombineRows& rows = with.rows;
  const int blocks = with.blocks;
  const int head = blockIdx.x / blocks, tile = blockIdx.x % blocks + consumer * blocks;
  if (threadIdx.x == 0) {
    for (int step = 0; step < kSteps; ++step) barrier_init(shared.matrix_full[step], 1);
    shared.rings.init(1, 4);
    barrier_init_done();
  }
  __syncthreads();
  launch_next();
  if (role < 8) {
    combine<problem>(shared, consumer, rows, head, tile, 2 * blocks, with.lse_latent, with.lse_decompressed, with.o_map,
                     with.lse);
  } else if (lane_id() == 0) {
    if constexpr (problem.latent_parts > 0) {
      if (consumer == 0) {
        for (int step = 0; step < kSteps; ++step) {
          barrier_expect(shared.matrix_full[step], kMatrixStepBytes);
          tma_load(shared.matrix[step], with.w_map, step * 64, 0, head, shared.matrix_full[step]);
        }
      }
    }
    wait_for_previous();
    load_rows<problem, tiling.keep ? Keep::normal : Keep::evict_first>(shared, consumer, rows, head, tile, 2 * blocks,
                                                                       with.latent_map, with.decompressed_map);
  }
}

}  // namespace hypermla::cute
