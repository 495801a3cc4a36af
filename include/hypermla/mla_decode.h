// Decoding with Multi-head Latent Attention as a serving engine calls it: tokens first, a paged cache, lengths on the
// device, one plan per step that all layers share.
//
//   hypermla::MlaDecode decode({.heads = 128, .max_requests = 256, .max_queries = 2, .max_tokens = 131072});
//   decode.plan(lengths, query_starts, requests, stream);                     // once per step
//   for (Layer& layer : layers) decode.run(layer.tensors, stream);            // once per layer
//
// A MlaDecode is made for a capacity, not for a shape. Kernel, grid and workspace follow from the capacity alone.
// plan() and run() neither allocate, nor synchronise, nor read back. Both may be captured in a CUDA graph, and a graph
// stays right when the contents of `lengths`, `query_starts` and `block_table` change between replays. Requests that
// pad a batch have no queries and no tokens.
//
// What is computed, for every query and head (DeepSeek-V2, arXiv 2405.04434, section 2.1, with absorbed projections):
//
//   o = softmax(scale (q_latent z^T + q_rope k_rope^T)) z       q_latent, z, o: 512 columns; q_rope, k_rope: 64
//
// over the tokens of its request. Causal: query i of the n of a request sees the first tokens - n + i + 1 tokens; the
// tokens count the new ones, which the cache already holds.
//
// Several GPUs may share the context of every request ("context parallelism"): token i is in the cache of shard
// (i / interleave) % shards, in order, and each GPU attends to its own. Lengths, causality and max_tokens count the
// whole request, in all shards; the block table lists pages of this shard's cache. The outputs of all shards
// are merged by their log-sum-exp (merge_states in mla_cache.h). A query that sees no token of a shard has an empty row
// there.
//
// Sparse (DeepSeek-V3.2's attention): every query attends to the tokens that an indexer chose for it. Then a request of
// the above is one query, and its row of the block table lists slots of the cache instead of pages: page * the page's
// tokens + the token in it. Entries below 0 or beyond the cache are no tokens, anywhere in the list.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "hypermla/hypermla.h"
#include "hypermla/mla_cache_format.h"

namespace hypermla {

struct MlaDecodeOptions {
  int heads = 128;                // query heads on this device
  int max_requests = 1;           // of a step, padding included
  int max_queries = 1;            // of a request: 1, or 1 + drafts
  int max_query_tokens = 0;       // queries of all requests of a step; 0: max_requests * max_queries
  int max_tokens = 4096;          // of a request
  int page = 64;                  // tokens of a page of the cache: 1, 16, 32, 64 or 128
  DType dtype = DType::bfloat16;  // of queries, cache and output: bfloat16 or float16
  bool causal = true;             // without effect where attention is sparse: a list may hold any tokens
  bool sparse = false;  // max_requests: queries of a step; max_queries is 1; max_tokens: the longest list (top-k)
  MlaCacheFormat cache_format = MlaCacheFormat::as_queries;  // in FP8: with bfloat16 as dtype
  bool fp8_queries = false;  // in e4m3 with one factor for all, of a cache in fp8_576 that is not sparse; o is of dtype
  float scale = 0;           // of the scores, from 2^-60 to 2^60; 0: 1 / sqrt(128 + 64)
  // Tokens after which every request is cut, a multiple of 64, so that the bits of its output depend neither on its
  // place nor on its batch mates; 0: wherever it is fastest.
  int split = 0;
  bool lse_base2 = false;           // the log-sum-exp in base 2 instead of natural
  bool empty_lse_positive = false;  // of a query that sees no token: +infinity instead of -infinity. Its output is 0.
  // GPUs that share the context of every request, which of them this is, and tokens of a turn.
  int shards = 1, shard = 0, interleave = 1;
  // Neighbouring requests whose rows of the block table have equal first entries begin with the same tokens. These are
  // attended to once for all of the requests, where that saves enough. plan() gets the table. Not with sparse, FP8,
  // split, shards or sinks.
  bool shared_prefixes = false;
  // Pins a kernel by its full name, "cute.mla.flash_mla_v1"; empty: the one that suits the capacity.
  std::string kernel = "";
};

// The tensors of one layer, in the device's memory. Strides count elements; those of queries, output and cache are
// multiples of 8, and pointers are aligned to 16 bytes. The innermost dimension is dense. A cache in FP8 is
// cache_latent alone, and its strides count bytes, multiples of 16; the page's stride is a multiple of the token's.
// Strides of queries in FP8 count bytes, too. Where attention is sparse, pages follow each other: the page's stride is
// that of its tokens.
struct MlaDecodeTensors {
  struct Rows {
    const void* data = nullptr;
    std::int64_t token_stride = 0, head_stride = 0;
    bool operator==(const Rows&) const = default;
  };
  Rows q_latent, q_rope;               // [query_tokens, heads, 512] and [.., 64]
  int query_tokens = 0;                // of these tensors and of o: the queries of the plan or more; 0: no work
  const void* cache_latent = nullptr;  // [pages, page, 512], or [pages, page, 656 or 576] bytes
  const void* cache_rope = nullptr;    // [pages, page, 64]
  std::int64_t latent_page_stride = 0, latent_token_stride = 0, rope_page_stride = 0, rope_token_stride = 0;
  std::int64_t pages = 0;
  // [requests, at least the pages of the longest]; entries behind a request's end may hold anything. Sparse: [queries,
  // max_tokens] slots. Rows of the last plan's requests may be read up to their stride, and while the kernel in front
  // still runs: then as a guess.
  const int* block_table = nullptr;
  std::int64_t table_stride = 0;  // from a request to the next
  void* o = nullptr;              // [query_tokens, heads, 512], memory of its own
  std::int64_t o_token_stride = 0, o_head_stride = 0;
  // float [query_tokens, heads] by its strides; with a request stride it is [requests, ..] instead, query 0 of each
  // first.
  float* lse = nullptr;
  std::int64_t lse_token_stride = 0, lse_head_stride = 0, lse_request_stride = 0;
  // Attention sinks, float [heads], or null, which it is with shards: the output of a head is multiplied by
  // exp(lse) / (exp(lse) + exp(sinks[head])); lse is not.
  const float* sinks = nullptr;
  const float* cache_scale = nullptr;                        // float [1], positive, of fp8_576 only: its factor
  const float* q_scale = nullptr;                            // float [1], positive, of fp8_queries only: theirs
  bool operator==(const MlaDecodeTensors&) const = default;  // the same memory

  // Queries [tokens, heads, 576], of bytes where they are in FP8, a cache [pages, page, 576] in their type or, in FP8,
  // of as many bytes as a token has, and outputs [tokens, heads, 512] and [tokens, heads], all dense.
  HYPERMLA_API static MlaDecodeTensors fused(int heads, int page, const void* q, int query_tokens, const void* cache,
                                             std::int64_t pages, const int* block_table, std::int64_t table_stride,
                                             void* o, float* lse,
                                             MlaCacheFormat cache_format = MlaCacheFormat::as_queries,
                                             bool fp8_queries = false);
};

class HYPERMLA_API MlaDecode {
 public:
  // The largest capacity: heads, requests of a step, queries and tokens of a request.
  static constexpr int kMaxHeads = 1024, kMaxRequests = 2048, kMaxQueries = 1024, kMaxTokens = 1 << 20;
  static constexpr int kMaxShards = 32, kMaxInterleave = 128;
  // Queries of a step, at most, that Hopper's kernels take of so many heads: queries * heads * heads is below 2^32.
  static constexpr int most_query_tokens(int heads) {
    const std::int64_t most = ((std::int64_t{1} << 32) - 1) / (std::int64_t{heads} * heads);
    return int(most < INT32_MAX ? most : INT32_MAX);
  }

  // Compiles (or finds in the cache) and loads its kernels. `workspace`: workspace_bytes() of the device's memory,
  // aligned to 256 bytes, which the caller owns and no other work uses between plan() and the last run() after it;
  // null: memory of its own. Throws Error for options without a meaning.
  explicit MlaDecode(const MlaDecodeOptions& options, const DeviceHandle& device = DeviceHandle(),
                     void* workspace = nullptr);
  ~MlaDecode();
  MlaDecode(MlaDecode&&) noexcept;
  MlaDecode& operator=(MlaDecode&&) noexcept;

  // What a MlaDecode of these options needs, and what this one has.
  static std::size_t workspace_bytes(const MlaDecodeOptions& options, const DeviceHandle& device = DeviceHandle());
  std::size_t workspace_bytes() const;

  // The least `split` for these options whose workspace takes at most `bytes`, else one that cuts no request: 512
  // tokens times a power of two, which installations with compiled kernels bring.
  static int fixed_split(MlaDecodeOptions options, std::size_t bytes, const DeviceHandle& device = DeviceHandle());

  // Divides a step's work; on the device, in stream order. lengths: int32 [requests], tokens of each, the new ones and
  // those of other shards included; null where attention is sparse: max_tokens of each. query_starts: int32 [requests +
  // 1], the first 0, the queries of request r being those from query_starts[r] to query_starts[r + 1]; null:
  // max_queries of each. What exceeds the capacity check() reports: of tokens the first max_tokens count; a request of
  // more than max_queries queries is left out, wholly or but for the first max_queries, one that goes beyond
  // max_query_tokens wholly, and where query_starts fall all may be; rows of queries that are left out are not written.
  // A CPU's reference throws. Throws Error unless 0 <= requests <= max_requests. With shared_prefixes, and only then,
  // block_table and table_stride are those that run() will be given.
  void plan(const int* lengths, const int* query_starts, int requests, void* stream = nullptr,
            const int* block_table = nullptr, std::int64_t table_stride = 0);

  // Attention of one layer over the requests of the last plan(); with query_tokens 0 nothing is done or looked at.
  // Throws Error for tensors that it cannot take, and before the first plan(). Any thread may call, one at a time,
  // whatever device is current there.
  void run(const MlaDecodeTensors& tensors, void* stream = nullptr);

  // Waits for the device and throws Error if the last plan() was given lengths or query starts beyond the capacity.
  void check() const;

  // Which kernel runs, and why.
  std::string explain() const;

 private:
  struct State;
  Owned<State> state_;
};

}  // namespace hypermla
