// Attention for many queries over decompressed keys and values with RoPE keys that all heads share, for requests of as
// many queries each, with prefixes or without. The schedule is in decompressed/attend_tiles.cuh; here is which tiles
// there are.
//
// Prefixes: a tile holds the queries of as many whole requests of one prefix as fit (or 128 queries of one request);
// each request and column group is one copy. A list made by plan_prefixes says which. The tokens of a prefix may be cut
// into parts.
//
// grid = min(tiles, multiprocessors); kTileThreads threads, kTileSharedBytes of dynamic shared memory.
#pragma once

#include "decompressed/attend_tiles.cuh"
#include "flash_attention.h"
#include "plan_prefixes.h"

namespace hypermla::cute {

// What tiles with and without prefixes share.
template <DecompressedProblem problem>
struct AnyTiles {
  static constexpr DType dtype = problem.dtype;
  static constexpr bool causal = problem.causal, has_other_rows = false, may_be_half = false, has_parts = false;
  static constexpr bool reads_places = false;

  const FlashAttentionArguments& with;

  __device__ __forceinline__ bool is_followed(const auto& tile) const { return tile.tokens < with.t; }
  __device__ __forceinline__ int token(const auto&, int block) const { return block * kBlock; }
  __device__ __forceinline__ int head(const auto& tile) const { return tile.head; }
  __device__ __forceinline__ int rope_head(const auto& tile) const { return tile.head / with.h; }
  __device__ __forceinline__ unsigned short* o(const auto&, long long row) const {
    return static_cast<unsigned short*>(with.o) + row * 128;
  }
  __device__ __forceinline__ float* lse(const auto&, long long row) const { return with.lse + row; }
  __device__ __forceinline__ float lse_of(float maximum, float sum) const { return log_sum(maximum, sum) * kLn2; }
  __device__ __forceinline__ float empty_lse() const { return -kInfinity; }
};

// Every head of every batch element has the same queries. The order: sections of heads whose keys and values fit L2
// together; in a section, causal tiles that see the most tokens first, so that the last wave is made of short ones.
template <DecompressedProblem problem>
struct HeadTiles : AnyTiles<problem> {
  using AnyTiles<problem>::with, AnyTiles<problem>::causal;

  struct alignas(16) Tile {
    int head;    // of all heads of all batch elements; -1: no more tiles
    int row;     // first query
    int tokens;  // length of the request
    int blocks;  // that some query sees
  };

  __device__ __forceinline__ int row_tiles() const { return (with.s + kRows - 1) / kRows; }
  __device__ __forceinline__ int count() const { return with.b * with.h * row_tiles(); }
  __device__ __forceinline__ Tile at(int index) const {
    const int row_tiles = this->row_tiles(), heads = with.b * with.h;
    if (index >= heads * row_tiles) return {-1, 0, 0, 0};
    const int first_head = index / (with.heads_per_section * row_tiles) * with.heads_per_section;
    const int section = min(with.heads_per_section, heads - first_head);
    const int within = index - first_head * row_tiles;
    const int head = first_head + within % section;
    const int m = causal ? row_tiles - 1 - within / section : within / section;
    const int tokens = with.lengths ? with.lengths[head / with.h] : with.t;
    const int seen = causal ? min(tokens, tokens - with.s + (m + 1) * kRows) : tokens;
    return {head, m * kRows, tokens, seen > 0 ? (seen + kBlock - 1) / kBlock : 0};
  }
  __device__ __forceinline__ int draw(Shared& shared, int index) const {
    const Tile tile = at(index);
    if (lane_id() == 0)
      *reinterpret_cast<int4*>(shared.tile) = make_int4(tile.head, tile.row, tile.tokens, tile.blocks);
    return tile.head;
  }
  __device__ __forceinline__ void take_queries(Shared& shared, Ring<kKeyStages>& ring, const Tile& tile) const {
    if (tile.blocks > 0) load_rows(shared, ring, with.q_map, with.qpe_map, tile.row, tile.head, tile.head);
  }
  __device__ __forceinline__ int first_block(const Tile&) const { return 0; }
  __device__ __forceinline__ int seen(const Tile& tile, int row) const {
    if constexpr (!causal) return tile.tokens;
    return min(tile.tokens, tile.tokens - with.s + tile.row + row + 1);
  }
  __device__ __forceinline__ int seen_by_all(const Tile& tile, int first_row) const { return seen(tile, first_row); }
  __device__ __forceinline__ long long place(const Tile& tile, int row) const {
    return tile.row + row < with.s ? static_cast<long long>(tile.head) * with.s + tile.row + row : -1;
  }
};

// Chunks of requests that share a prefix, see plan_prefixes.h.
template <DecompressedProblem problem>
struct PrefixTiles : AnyTiles<problem> {
  using AnyTiles<problem>::with, AnyTiles<problem>::causal;

  struct alignas(16) Tile {  // a Chunk, and
    int head;                // of all heads of all prefixes; -1: no more tiles
    int row, tokens, blocks, first, requests, first_block, part;
  };
  static_assert(sizeof(Tile) == sizeof(Chunk));

  __device__ __forceinline__ int request(int index) const { return with.order ? with.order[index] : index; }
  __device__ __forceinline__ int count() const { return with.h * with.chunk_list->chunks; }
  __device__ __forceinline__ int draw(Shared& shared, int index) const {
    const int chunks = with.chunk_list->chunks, of_prefix = index / chunks, lane = lane_id();
    int head = -1;
    if (of_prefix < with.h) {
      const Chunk* chunk = reinterpret_cast<const Chunk*>(with.chunk_list + 1) + (index - of_prefix * chunks);
      if (lane < 2) reinterpret_cast<int4*>(shared.tile)[lane] = reinterpret_cast<const int4*>(chunk)[lane];
      head = chunk->prefix * with.h + of_prefix;
#pragma unroll 1
      for (int i = lane; i < chunk->requests; i += 32) shared.heads[i] = request(chunk->first + i) * with.h + of_prefix;
    }
    __syncwarp();
    if (lane == 0) shared.tile[0] = head;
    return head;
  }
  __device__ __forceinline__ void take_queries(Shared& shared, Ring<kKeyStages>& ring, const Tile& tile) const {
    if (tile.blocks == 0) return;
    const u32 to = shared.keys[ring.stage];
    const u32 full = ring.full();
    ring.wait_until_empty();
    const int rows = min(with.s, kRows);
    barrier_expect(full, tile.requests * rows * 384);
    u32 place = to;
    const int* head = shared.heads;
    for (int i = 0; i < tile.requests; ++i, ++head, place += rows * 128) {
      tma_load(place, with.q_map, tile.row, 0, *head, full);
      tma_load(place + kKeyBox, with.q_map, tile.row, 1, *head, full);
      tma_load(place + 2 * kKeyBox, with.qpe_map, tile.row, 0, *head, full);
    }
    ring.next();
  }
  __device__ __forceinline__ int first_block(const Tile& tile) const { return tile.first_block; }
  // Queries see the tokens of their request behind the prefix, too.
  __device__ __forceinline__ int seen(const Tile& tile, int row) const {
    if constexpr (!causal) return tile.tokens;
    const int index = with.s > kRows ? 0 : row / with.s, query = with.s > kRows ? tile.row + row : row - index * with.s;
    int after = with.after;
    if (with.after_lengths) after = index < tile.requests ? with.after_lengths[request(tile.first + index)] : 0;
    return min(tile.tokens, tile.tokens + after - with.s + query + 1);
  }
  __device__ __forceinline__ int seen_by_all(const Tile& tile, int first_row) const {
    if constexpr (!causal) return tile.tokens;
    const int query = with.s > kRows ? tile.row + first_row : 0;
    return min(tile.tokens, tile.tokens + (with.after_lengths ? 0 : with.after) - with.s + query + 1);
  }
  __device__ __forceinline__ long long place(const Tile& tile, int row) const {
    const int s = with.s, index = s > kRows ? 0 : row / s, query = s > kRows ? tile.row + row : row - index * s;
    if (index >= tile.requests || query >= s) return -1;
    const long long head =
        (static_cast<long long>(tile.part) * with.b + request(tile.first + index)) * with.h + tile.head % with.h;
    return head * s + query;
  }
};

// A query that sees no token gets o = 0 and lse = -inf. Causal: query i sees the tokens below length - s + i + 1.
template <DecompressedProblem problem, FlashAttentionTiling tiling>
__global__ void __launch_bounds__(kTileThreads, 1)
    flash_attention(const __grid_constant__ FlashAttentionArguments with) {
  static_assert(problem.d == 128 && problem.p == 64, "the layouts are made for 128 columns and 64 RoPE columns");
  if constexpr (problem.prefixes != 0)
    attend_tiles(PrefixTiles<problem>{{with}}, with.counter, [] { wait_for_previous(); });  // plan_prefixes
  else
    attend_tiles(HeadTiles<problem>{{with}}, with.counter, [] {});
}

}  // namespace hypermla::cute
