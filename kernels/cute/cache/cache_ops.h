// What the kernels of MlaCacheOps are given, by value: tensors by address and strides in elements, as
// include/hypermla/mla_cache.h describes them. Read by the host and by the device compiler.
#pragma once

#include "hypermla/tensor_map.h"

namespace hypermla::cute {

inline constexpr int kCopyThreads = 256;  // of a block of merge_states and of each append
inline constexpr int kMergeTurns = 2;     // rows of a thread of merge_states, which are loaded at once

struct MergeStatesArguments {
  struct Rows {
    void* data;
    long long token_stride, head_stride;
  };
  Rows o_a, o_b, o, lse_a, lse_b, lse;  // no address for lse: it is not wanted
  unsigned rows, heads;                 // rows: tokens * heads
  unsigned vectors;                     // of 8 columns, in a row
  float to_log2, from_log2;             // log-sum-exps to units of log2, and back
  float empty_lse;
};

struct CacheLayout {
  void *latent, *rope;
  long long latent_page_stride, latent_token_stride, rope_page_stride, rope_token_stride;
  unsigned pages, page;
};

inline constexpr unsigned kRowVectors = 72;     // of 16 bytes: 64 latent ones, then 8 rotary ones
inline constexpr unsigned kFp8RowVectors = 36;  // of 16 values: 32 latent ones, then 4 rotary ones
struct AppendArguments {
  const void *latent, *rope;
  long long latent_stride, rope_stride;
  const long long* slots;
  CacheLayout cache;
  unsigned tokens;
  const float* scale;  // of append_fp8_576 only
};

inline constexpr int kMatchRequests = 4, kMatchThreads = 32 * kMatchRequests;  // of a block of match_prefixes
// Of split_requests: the first block tells MlaPrefill, the others take as many requests each.
inline constexpr int kSplitThreads = 256, kSplitRequests = 4;
inline constexpr int kMostPrefixes = 16;
// As MlaCacheOps::Prefix.
struct alignas(16) KeptPrefix {
  int pages, first_token, least_queries, valid;
};
struct SplitArguments {
  const int* block_table;
  long long table_stride;
  const int *lengths, *query_starts;
  const long long* slots;
  KeptPrefix* prefixes;
  const int* prefix_pages;
  long long prefix_pages_stride;
  const unsigned* owners;
  unsigned* found;
  int* own_table;
  long long own_table_stride;
  int *own_lengths, *shared_query_starts, *shared_token_starts, *query_rows;
  int width, requests, tokens, page, count, cache_pages;
};

// What a block of decompress_prefix makes, of a number of heads: 128 tokens of both products of 128 columns. It reads
// the weights in steps of 64 latent columns.
inline constexpr int kPrefixTokens = 128, kPrefixSteps = 8, kPrefixStages = 3;
inline constexpr unsigned kPrefixThreads = 352;
inline constexpr unsigned kPrefixSharedBytes =
    2 * 64 * (kPrefixSteps * kPrefixTokens + 2 * kPrefixStages * 128) + 8 * (4 * kPrefixStages + 1);

struct DecompressPrefixArguments {
  // Of w_uk and w_uv, boxes of a step: with latent columns innermost [heads, 128, 512] in boxes of 128 rows x 64
  // columns; else [heads, 512, 128] in boxes of 64 rows x 2 groups of 64 columns.
  TensorMap weights[2];
  bool latent_innermost[2];
  CacheLayout cache;
  const int* block_table;
  struct Rows {
    unsigned short* data;
    long long token_stride, head_stride;
  };
  Rows out[2], k_rope;  // keys, values; no address for k_rope: it is not wanted
  int tokens, heads;
  int tiles, parts;  // of the tokens, of the heads
};

}  // namespace hypermla::cute
