// A template for matrix products in CUDA C++ for Hopper: c = a b^T, as in a linear layer, where b [n, k] is the weight.
//
//   hypermla verify-file examples/kernels/gemm_cute.cu
//   hypermla bench-file examples/kernels/gemm_cute.cu
//
// A tile is 128 x 256 of c. Thread blocks are persistent: each makes every gridDim.x-th tile. Tiles are numbered so
// that those that are made at the same time lie in a square: they read few different rows of a and b, which stay in L2.
//
// Roles (384 threads):
//   warpgroups 0, 1   consumers: 64 rows of the tile each; they multiply, and send their part of c
//   warpgroup 2       one thread is the producer: it loads the next steps of 64 columns while those before are
//                     multiplied, those of the next tile, too
//
// Shared memory (boxes of 64 columns with the 128-byte swizzle): ring of 4 x 48 KiB: 128 rows of a and 256 rows of b |
// 64 rows x 128 columns of c for each consumer | barriers.
//
// grid = up to one thread block per multiprocessor

// What both parts of the file know: the tiles of c, and how they are walked.
struct GemmTiles {
  int rows, columns;  // of tiles
  int side;           // rows of tiles that are walked together
  int steps;          // of 64 columns of a and b
};

#ifdef HYPERMLA_DEVICE

#include "hopper/constants.h"
#include "hopper/fragments.h"
#include "hopper/ring.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "hopper/wgmma.h"

namespace hypermla::cute {

constexpr int kStages = 4;
constexpr u32 kRowsBytes = 128 * 128, kColumnsBytes = 256 * 128;  // of a stage: rows of a, rows of b

struct Shared {
  Array<Bytes<kRowsBytes>, kStages> a;
  Array<Bytes<kColumnsBytes>, kStages> b;
  Array<Bytes<2 * kBoxBytes>, 2> c;
  RingBarriers<kStages> ring;
};
static_assert(sizeof(Shared) <= kMaxSharedBytes);

struct Tile {
  int row, column;  // the first of the tile, of c
};

// Tile number `index`, band by band of `side` rows of tiles.
__device__ __forceinline__ Tile tile_at(int index, const GemmTiles& tiles) {
  const int band = index / (tiles.side * tiles.columns), within = index % (tiles.side * tiles.columns);
  const int side = min(tiles.side, tiles.rows - band * tiles.side);
  return {(band * tiles.side + within % side) * 128, within / side * 256};
}

__device__ __forceinline__ void load(Shared& shared, const TensorMap& a, const TensorMap& b, const GemmTiles& tiles) {
  Ring<kStages> ring(shared.ring, Side::producer);
  for (int index = blockIdx.x; index < tiles.rows * tiles.columns; index += gridDim.x) {
    const Tile tile = tile_at(index, tiles);
    for (int step = 0; step < tiles.steps; ++step) {
      ring.wait_until_empty();
      barrier_expect(ring.full(), kRowsBytes + kColumnsBytes);
      tma_load(shared.a[ring.stage], a, tile.row, step, 0, ring.full());
      tma_load(shared.b[ring.stage], b, tile.column, step, 0, ring.full());
      ring.next();
    }
  }
}

__device__ __forceinline__ void multiply(Shared& shared, const TensorMap& c, int group, const GemmTiles& tiles) {
  float left[64], right[64];  // (64, 128) each: columns 0..127 and 128..255 of the tile
  Ring<kStages> ring(shared.ring, Side::consumer);
  const u32 a = operand_k_major(shared.a) + group * kNextBox;
  const u32 b = operand_k_major(shared.b);
  const bool leader = (thread_id() & 127) == 0;
  const u32 staged = shared.c[group];
  const u32 line = (thread_id() >> 5 & 3) * 16 + (lane_id() & 15);  // that this lane addresses

  // One step of the tile; `first`: the sums begin with it.
  auto products = [&](bool first) {  // (64, 256) += (64, 64) (256, 64)^T
    ring.wait_until_full();
    const u32 rows = a + ring.stage * (kRowsBytes >> 4), columns = b + ring.stage * (kColumnsBytes >> 4);
    mma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma<DType::bfloat16, 128>(left, rows + 2 * i, columns + 2 * i, !first || i > 0);
      mma<DType::bfloat16, 128>(right, rows + 2 * i, columns + 2 * kNextBox + 2 * i, !first || i > 0);
    }
    mma_commit();
  };
  // Sends half of the columns, from `column` on, as two boxes.
  auto store = [&](const float* sums, int row, int column) {
    if (leader) tma_store_read_wait();  // what these boxes held before has left
    named_sync(1 + group, 128);
#pragma unroll
    for (int unit = 0; unit < 16; unit += 2) {
      u32 packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[i] = pack<DType::bfloat16>(sums[4 * unit + 2 * i], sums[4 * unit + 2 * i + 1]);
      store_matrices(staged + unit / 8 * kBoxBytes + swizzled(line, unit % 8 + (lane_id() >> 4)), packed[0], packed[1],
                     packed[2], packed[3]);
    }
    async_fence();
    named_sync(1 + group, 128);
    if (leader) tma_store(c, staged, row + group * 64, column / 64, 0);
  };

  for (int index = blockIdx.x; index < tiles.rows * tiles.columns; index += gridDim.x) {
    const Tile tile = tile_at(index, tiles);
    products(true);
    for (int step = 1; step < tiles.steps; ++step) {
      const u32 before = ring.empty();
      ring.next();
      products(false);
      mma_wait<1>();  // the products of the step before have read their stage
      warp_arrive(before);
    }
    mma_wait<0>();
    pin<64>(left);
    pin<64>(right);
    warp_arrive(ring.empty());
    ring.next();
    store(left, tile.row, tile.column);
    store(right, tile.row, tile.column + 128);
  }
  if (leader) tma_store_wait();  // shared memory lives until it has been read
}

// a [m, k], b [n, k] in boxes of 128 and 256 rows, c [m, n] in boxes of 64 rows and 2 x 64 columns.
__global__ void __launch_bounds__(384, 1) gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                                               const __grid_constant__ TensorMap c, const GemmTiles tiles) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0);
  if (threadIdx.x == 0) {
    shared.ring.init(1, 8);  // the producer; the warps of the consumers
    barrier_init_done();
  }
  __syncthreads();
  if (role == 2) {
    give_registers<40>();
    if (threadIdx.x == 256) load(shared, a, b, tiles);
  } else {
    take_registers<232>();
    multiply(shared, c, role, tiles);
  }
}

}  // namespace hypermla::cute

#else

#include <algorithm>

#include "hypermla/kernel_file.h"

using hypermla::DType;

void describe(hypermla::KernelFile& file) {
  const auto m = file.size("m", 8192, 203, "rows of a and c");
  const auto n = file.size("n", 8192, 320, "rows of b, columns of c");
  const auto k = file.size("k", 8192, 192, "columns of a and b");
  const auto side = file.size("side", 16, 2, "rows of tiles that are walked together");
  // The copy engine brings boxes of 64 columns; rows beyond the end it reads as zeros and does not write.
  const int a = file.input("a", DType::bfloat16, {m, k}, 64);
  const int b = file.input("b", DType::bfloat16, {n, k}, 64);
  const int c = file.output("c", DType::bfloat16, {m, n}, 64);
  const auto tiles_m = (m + 127) / 128, tiles_n = (n + 255) / 256;
  constexpr int kShared = 4 * (128 + 256) * 128 + 2 * 2 * 8192 + 64;  // sizeof(Shared)
  file.kernel("cute", "hypermla::cute::gemm");
  file.launch(std::min<std::int64_t>(file.processors(), tiles_m * tiles_n), 1, 1, 384, kShared);
  file.pass_map(a, 128, 1);
  file.pass_map(b, 256, 1);
  file.pass_map(c, 64, 2);
  file.pass_value(GemmTiles{int(tiles_m), int(tiles_n), int(side), int(k / 64)});
  file.work(2.0 * m * n * k, 2.0 * (m * k + n * k + m * n));
}

void reference(const hypermla::Row& at) {
  const auto n = at.size(1), k = at.size(2);
  const auto a = at.input(0), b = at.input(1);
  for (std::int64_t j = 0; j < n; ++j) {
    double sum = 0;
    for (std::int64_t i = 0; i < k; ++i) sum += a[at.row * k + i] * b[j * k + i];
    at.output(0)[j] = sum;
  }
}

HYPERMLA_KERNEL_FILE(describe, reference)

#endif
