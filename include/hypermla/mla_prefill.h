// Prefill with Multi-head Latent Attention as a serving engine calls it: attention over decompressed keys and values,
// requests of any lengths one after the other, one plan per step that all layers share. With MlaDecode
// (mla_decode.h) an engine has both sides.
//
//   hypermla::MlaPrefill prefill({.heads = 128, .max_requests = 64, .max_query_tokens = 8192, .max_tokens = 131072});
//   prefill.plan(query_starts, token_starts, requests, stream);                // once per step
//   for (Layer& layer : layers) prefill.run(layer.tensors, stream);            // once per layer
//
// A MlaPrefill is made for a capacity, not for a shape: grid and workspace follow from it. plan() and run() neither
// allocate, nor synchronise, nor read back. Both may be captured in a CUDA graph, and a graph stays right when the
// contents of `query_starts` and `token_starts` change between replays. Requests that pad a batch have no queries.
//
// What is computed, for every query and head (DeepSeek-V2, arXiv 2405.04434, section 2.1):
//
//   o = softmax(scale (q_nope k_nope^T + q_rope k_rope^T)) v        nope, v, o: 128 columns; rope: 64
//
// over the tokens of its request. Causal: query i of the n of a request with m tokens sees the first m - n + i + 1 of
// them. The log-sum-exps merge the results over several ranges of a request's tokens, as of a prefix in chunks; with
// `accumulate` run() merges them itself, also into what MlaDecode attended to (docs/shared-prefixes.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "hypermla/hypermla.h"

namespace hypermla {

struct MlaPrefillOptions {
  int heads = 128;                // of queries, keys and values on this device
  int max_requests = 1;           // of a step, padding included
  int max_query_tokens = 8192;    // queries of all requests of a step
  int max_tokens = 131072;        // of a request
  DType dtype = DType::bfloat16;  // of queries, keys, values and output: bfloat16 or float16
  bool causal = true;
  float scale = 0;                  // of the scores, from 2^-60 to 2^60; 0: 1 / sqrt(128 + 64)
  bool lse_base2 = false;           // the log-sum-exp in base 2 instead of natural
  bool empty_lse_positive = false;  // of a query that sees no token: +infinity instead of -infinity. Its output is 0.
  // o and lse hold the attention of the same queries over other tokens, and run() merges its own into them. A query
  // whose lse is infinite, of either sign, has none, and its o may hold anything. Queries that the plan does not have
  // keep their values, but that those of an infinite lse among the first max_query_tokens become empty rows. The
  // workspace holds an output of max_query_tokens, too.
  bool accumulate = false;
  // plan() is told where its queries are: they may lie anywhere among those of q, o and lse.
  bool query_rows = false;
  // The bits of a request's output depend neither on its place nor on its batch mates. Else, where a step has few
  // queries and heads, the tokens of its requests are cut, for which the workspace holds 26 MB on 132 multiprocessors.
  bool batch_invariant = false;
};

// The tensors of one layer, in the device's memory. Strides count elements; those of 16-bit tensors are multiples of 8,
// and their pointers are aligned to 16 bytes. The innermost dimension is dense.
struct MlaPrefillTensors {
  struct Rows {
    const void* data = nullptr;
    std::int64_t token_stride = 0, head_stride = 0;
    bool operator==(const Rows&) const = default;
  };
  Rows q_nope, q_rope;   // [query_tokens, heads, 128] and [.., 64]
  int query_tokens = 0;  // of these tensors and of o and lse: the queries of the plan or more; 0: no work
  Rows k_nope, k_rope;   // [tokens, heads, 128] and [.., 64]; k_rope with a head stride of 0: one for all heads
  Rows v;                // [tokens, heads, 128]
  int tokens = 0;        // of these tensors: the tokens of the plan or more; 0: they are not read
  void* o = nullptr;     // [query_tokens, heads, 128], memory of its own
  std::int64_t o_token_stride = 0, o_head_stride = 0;
  float* lse = nullptr;  // float [query_tokens, heads], or [heads, query_tokens] by its strides
  std::int64_t lse_token_stride = 0, lse_head_stride = 0;
  bool operator==(const MlaPrefillTensors&) const = default;  // the same memory

  // Queries [query_tokens, heads, 192], keys [tokens, heads, 192], values [tokens, heads, 128], outputs [query_tokens,
  // heads, 128] and [query_tokens, heads], all dense.
  HYPERMLA_API static MlaPrefillTensors dense(int heads, const void* q, int query_tokens, const void* k, const void* v,
                                              int tokens, void* o, float* lse);
};

class HYPERMLA_API MlaPrefill {
 public:
  // The largest capacity. A workspace has up to 32 bytes for each request, for queries with `accumulate` an output and
  // with `query_rows` 4 bytes, for tokens nothing.
  static constexpr int kMaxHeads = 1024, kMaxRequests = 2048, kMaxQueryTokens = 1 << 24, kMaxTokens = 1 << 20;

  // Compiles (or finds in the cache) and loads its kernels. `workspace`: workspace_bytes() of the device's memory,
  // aligned to 256 bytes, which the caller owns and no other work uses between plan() and the last run() after it;
  // null: memory of its own. Throws Error for options without a meaning.
  explicit MlaPrefill(const MlaPrefillOptions& options, const DeviceHandle& device = DeviceHandle(),
                      void* workspace = nullptr);
  ~MlaPrefill();
  MlaPrefill(MlaPrefill&&) noexcept;
  MlaPrefill& operator=(MlaPrefill&&) noexcept;

  // What a MlaPrefill of these options needs, and what this one has.
  static std::size_t workspace_bytes(const MlaPrefillOptions& options, const DeviceHandle& device = DeviceHandle());
  std::size_t workspace_bytes() const;

  // Divides a step's work; on the device, in stream order. query_starts and token_starts: int32 [requests + 1]; request
  // r has the queries from query_starts[r] to query_starts[r + 1], and the keys and values from token_starts[r] to
  // token_starts[r + 1]. What exceeds the capacity check() reports: of tokens the first max_tokens count; a request
  // that goes beyond max_query_tokens is left out, and where query_starts fall all may be; on a CPU it throws. Throws
  // Error unless 0 <= requests <= max_requests.
  void plan(const int* query_starts, const int* token_starts, int requests, void* stream = nullptr);
  // The same of an object with the option query_rows: query i of the plan is row query_rows[i] of q, o and lse, in any
  // order, none of them twice. query_rows: int32, of which query_starts[requests] are read. A row that is negative or
  // not below max_query_tokens check() reports, and no request has queries then; one that the tensors of a run do not
  // have is not stored. On a CPU both throw.
  void plan(const int* query_starts, const int* token_starts, int requests, const int* query_rows, void* stream);

  // Attention of one layer over the requests of the last plan(); with query_tokens 0 nothing is done or looked at.
  // Throws Error for tensors that it cannot take, and before the first plan(). Any thread may call, one at a time,
  // whatever device is current there.
  void run(const MlaPrefillTensors& tensors, void* stream = nullptr);

  // Waits for the device and throws Error if the last plan() was given starts that fall or exceed the capacity.
  void check() const;

  // Which kernel runs, and why.
  std::string explain() const;

 private:
  struct State;
  Owned<State> state_;
};

}  // namespace hypermla
