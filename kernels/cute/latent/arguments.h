// What the latent kernels are given, by value: tensors by address and strides, and the work list. The host fills it for
// every launch (latent_plan.h).
#pragma once

#include "hypermla/tensor_map.h"
#include "shards.h"
#include "work.h"
#ifdef __CUDACC__
#include "hopper/constants.h"
#endif

namespace hypermla::cute {

// Where rows lie in a tensor. The rows of a request are its heads and queries; those of all requests follow each other.
// Row r is at (r / inner) * outer_stride + (r % inner) * inner_stride elements, counted from the first request or, with
// a request_stride, from the begin of each.
struct RowLayout {
  Divisor inner = {};
  long long outer_stride = 0, inner_stride = 0, request_stride = 0;

#ifdef __CUDACC__
  __device__ __forceinline__ long long offset(int request, int first_row, int row) const {  // elements
    const unsigned at = request_stride ? row : first_row + row, outer = inner.divide(at), rest = at - outer * inner.by;
    return request * request_stride + outer * outer_stride + rest * inner_stride;
  }
#endif
};

inline constexpr int kLeastBox = 16;  // tokens of a page that is loaded as boxes; those of 1 are gathered
constexpr bool is_gathered(int page) { return page > 0 && page < kLeastBox; }  // 0: no pages
#ifdef __CUDACC__
// Pages that a block of tokens has: 1 also of larger pages, and without pages.
constexpr int pages_of_block(int page) { return page > 0 && page < kTile ? kTile / page : 1; }

// How L2 treats gathered tokens: those of a request are read once, and need not stay. Lists that an indexer chose,
// which are never causal, share tokens.
constexpr Keep keep_gathered(bool causal) { return causal ? Keep::evict_first : Keep::normal; }
#endif

struct LatentArguments {
  // Queries [rows, 512] and [rows, 64] of all requests, as (64 columns, row % query_inner, row / query_inner, groups,
  // end): one box is the 64 columns of a tile, as many groups as the kernel says. The third axis has query_places
  // places, which lie before the tensor, and the last one moves them by as many as lie before the end of a request. So
  // place query_places is that end, and a box is read up to there: what is behind it are zeros.
  TensorMap qc_map = {}, qpe_map = {};
  // Latents and RoPE keys as (64 columns, tokens, groups, batch), where a page of a paged cache is a batch element.
  TensorMap z_map = {}, kpe_map = {};
  const WorkItem* work = nullptr;  // [workers, rounds]
  MergeState* merges = nullptr;    // [slots]
  // The pools where single tokens are gathered: `tokens` of them, z_stride and kpe_stride bytes apart. An entry of the
  // table that is not below `tokens` is no token.
  const void* z = nullptr;
  const void* kpe = nullptr;
  const int* block_table = nullptr;    // [requests, table_width]: the pages of every request
  const int* after_lengths = nullptr;  // [requests]; null: `after` each
  void* o = nullptr;                   // rows of 512 columns, in the type of the queries
  float* lse = nullptr;
  void* o_part = nullptr;  // [slots, rows of a tile, 512], of tiles cut over several items, in the kernel's order
  // [slots, part_row_floats * rows of a tile], in the kernel's order: log-sum-exp in log2, and what the pieces of the
  // row are multiplied by.
  float* lse_part = nullptr;
  RowLayout o_rows = {}, lse_rows = {};
  float scale_log2 = 0;  // of the scores, times log2(e); positive
  float lse_unit = 0;    // of lse per log2: ln 2 for natural logarithms
  float empty_lse = 0;   // of rows that see no token
  // [heads], natural logarithms: what a head's weights are divided by is larger by exp(sink). Null: none. Where heads
  // change faster than queries among the rows. lse does not count them.
  const float* sinks = nullptr;
  Divisor query_inner;
  int query_places = 0;
  int heads = 0;
  int rounds = 0;
  int planned = 0;  // 1: a kernel before this one made the work list; 0: the host did
  int table_width = 0;
  // Token blocks that each thread block asks L2 for while the kernel before this one ends (ask_ahead.cuh); 0: none. And
  // the requests that the table, or a dense cache, has: a work list that is not written yet may name others.
  int ahead = 0, requests = 0;
  unsigned tokens = 0;
  int z_stride = 0, kpe_stride = 0;
  // Where single tokens are gathered, of FP8 also from pages: the tokens of a page, and places of the pool from a page
  // to the next; 1 and 1 where the table lists tokens. What those of 576 e4m3 are multiplied by, [1], and queries in
  // FP8.
  Divisor page = {};
  int page_places = 1;
  const float* cache_scale = nullptr;
  const float* q_scale = nullptr;
  int after = 0;  // causal: query i of n sees the first tokens + after - n + i + 1 tokens, at most all
  // Causal and of several: query i of n sees of the first whole - n + i + 1 tokens of a request those that are here.
  Shards shards = {};

#ifdef __CUDACC__
  // The items of this thread block, one after the other.
  __device__ __forceinline__ const WorkItem* own_work() const {
    return work + static_cast<long long>(blockIdx.x) * rounds;
  }
  // A place of the pools as the table has it; -1: no token. Not where the entry is read: that would wait for it.
  __device__ __forceinline__ int place_of(int entry) const {
    return static_cast<unsigned>(entry) < tokens ? entry : -1;
  }
  // The sink of a row of a request, in log2; -infinity: none.
  __device__ __forceinline__ float sink(int row) const { return sinks ? sinks[row % heads] * kLog2e : -kInfinity; }
#endif
};

}  // namespace hypermla::cute
