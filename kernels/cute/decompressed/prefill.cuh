// Attention for many queries over decompressed keys and values, for requests of any numbers of queries and tokens that
// follow each other in tensors with the tokens first. The schedule is in attend_tiles.cuh, the tiles are those of
// prefill_list.h.
//
// A tile's boxes may reach into the next request: rows of queries that are not the tile's become zeros and are not
// stored, keys behind the request's end are masked, and values there are overwritten with zeros.
//
// With problem.rows queries lie anywhere in the tensors: where those of a tile do not follow each other, each comes by
// copies of its own.
//
// Where there are few tiles, the planner cuts the tokens of each into parts, which prefill_parts.cuh merges.
//
// grid = multiprocessors; kTileThreads threads, kTileSharedBytes of dynamic shared memory.
#pragma once

#include "attend_tiles.cuh"
#include "prefill_items.cuh"
#include "prefill_parts.cuh"

namespace hypermla::cute {

template <PrefillProblem problem>
struct PrefillTiles {
  using Tile = PrefillTile;
  static constexpr DType dtype = problem.dtype;
  static constexpr bool causal = problem.causal, has_other_rows = true, may_be_half = true, has_parts = true;
  static constexpr bool reads_places = problem.rows;

  const PrefillArguments& with;
  int item = 0;  // of the last tile that was drawn

  __device__ __forceinline__ int count() const { return with.list->tiles; }
  // A tile's rows, for take_queries(): all of them, or the complement of the first, where the others follow it.
  __device__ __forceinline__ void find_rows(Shared& shared, const PrefillTile& tile) const {
    const int* const rows = with.query_rows + tile.query;
    const int lane = lane_id();
    int row[kRows / 32];  // all on their way at once
#pragma unroll
    for (int j = 0; j < kRows / 32; ++j) row[j] = 32 * j + lane < tile.rows ? rows[32 * j + lane] : 0;
    const int first = __shfl_sync(~0u, row[0], 0);
    bool follow = true;
#pragma unroll
    for (int j = 0; j < kRows / 32; ++j) {
      follow &= 32 * j + lane >= tile.rows || row[j] == first + 32 * j + lane;
      shared.heads[32 * j + lane] = row[j];
    }
    if (__all_sync(~0u, follow) && lane == 0) shared.heads[0] = ~first;
  }
  __device__ __forceinline__ int draw(Shared& shared, int index) {
    PrefillTile& tile = *reinterpret_cast<PrefillTile*>(shared.tile);
    if (index >= count()) {
      if (lane_id() == 0) tile.head = -1;
      return -1;
    }
    item = prefill_item_of(with.list, index, item);
    const PrefillItem& of = reinterpret_cast<const PrefillItem*>(with.list + 1)[item];
    if (lane_id() == 0) {
      const unsigned part = index - of.first_tile, parts = of.parts, number = part / parts;
      tile = prefill_tile(of, number, with.heads, causal);
      if constexpr (!problem.rows) tile.rows = min(tile.rows, with.query_tokens - tile.query);
      if (parts > 1) cut_tile(tile, of, number, part - number * parts, count() <= static_cast<int>(gridDim.x));
    }
    __syncwarp();
    if constexpr (problem.rows) {
      find_rows(shared, tile);
      __syncwarp();
    }
    return tile.head;
  }
  __device__ __forceinline__ void take_queries(Shared& shared, Ring<kKeyStages>& ring, const Tile& tile) const {
    if (tile.blocks <= 0) return;
    int first = tile.query;
    if constexpr (problem.rows) {
      const int* const rows = shared.heads;
      if (rows[0] >= 0) {
        const u32 full = ring.full();
        u32 to = shared.keys[ring.stage];
        ring.wait_until_empty();
        barrier_expect(full, tile.rows * 384);
#pragma unroll 1
        for (int i = 0; i < tile.rows; ++i, to += 128) {
          const int row = rows[i];
          tma_load(to, with.q_row_map, row, 0, tile.head, full);
          tma_load(to + kKeyBox, with.q_row_map, row, 1, tile.head, full);
          tma_load(to + 2 * kKeyBox, with.qpe_row_map, row, 0, tile.head, full);
        }
        ring.next();
        return;
      }
      first = ~rows[0];
    }
    load_rows(shared, ring, with.q_map, with.qpe_map, first, tile.head, tile.head);
  }
  __device__ __forceinline__ int first_block(const Tile&) const { return 0; }
  __device__ __forceinline__ int token(const Tile& tile, int block) const { return tile.token + block * kBlock; }
  __device__ __forceinline__ int head(const Tile& tile) const { return tile.head; }
  __device__ __forceinline__ int rope_head(const Tile& tile) const { return min(tile.head, with.rope_heads - 1); }
  __device__ __forceinline__ int seen(const Tile& tile, int row) const {
    return causal ? min(tile.tokens, tile.diagonal + row + 1) : tile.tokens;
  }
  __device__ __forceinline__ int seen_by_all(const Tile& tile, int first_row) const { return seen(tile, first_row); }
  __device__ __forceinline__ bool is_followed(const Tile&) const { return true; }
  __device__ __forceinline__ long long query(const Tile& tile, int row) const {
    return row < tile.rows ? tile.query + row : -1;
  }
  __device__ __forceinline__ long long place(const Tile& tile, int row) const {
    const long long number = query(tile, row);
    if constexpr (!problem.rows) return number;
    const int of_tensors = number >= 0 ? with.query_rows[number] : -1;
    return of_tensors < with.query_tokens ? of_tensors : -1;
  }
  __device__ __forceinline__ unsigned short* o(const Tile& tile, long long query) const {
    return static_cast<unsigned short*>(with.o) + query * with.o_token_stride + tile.head * with.o_head_stride;
  }
  __device__ __forceinline__ float* lse(const Tile& tile, long long query) const {
    return with.lse + query * with.lse_token_stride + tile.head * with.lse_head_stride;
  }
  __device__ __forceinline__ float lse_of(float maximum, float sum) const {
    return sum == 0.0f ? with.empty_lse : (maximum + log2_fast(sum)) * with.lse_unit;
  }
  __device__ __forceinline__ float empty_lse() const { return with.empty_lse; }
  __device__ __forceinline__ bool is_part(const Tile& tile) const { return tile.parts > 1; }
  __device__ __forceinline__ void store_part(const Tile& tile, int row, const float* o, float2 factors,
                                             float2 lse) const {
    cute::store_part(with.parts, tile, row, o, factors, lse);
  }
  __device__ __forceinline__ void merge_parts(const Tile& tile, int group, int barrier) const {
    cute::merge_parts(with.parts, tile, group, barrier, [&](int row, float4 columns, float maximum, float sum) {
      const long long to = place(tile, row);
      if (to < 0) return;
      const int lane = lane_id();
      reinterpret_cast<uint2*>(o(tile, to))[lane] =
          make_uint2(pack<dtype>(columns.x, columns.y), pack<dtype>(columns.z, columns.w));
      if (lane == 0) *lse(tile, to) = lse_of(maximum, sum);
    });
  }
};

template <PrefillProblem problem>
__global__ void __launch_bounds__(kTileThreads, 1) prefill(const __grid_constant__ PrefillArguments with) {
  attend_tiles(PrefillTiles<problem>{with}, &with.list->drawn, [] { wait_for_previous(); });  // plan_prefill
}

}  // namespace hypermla::cute
