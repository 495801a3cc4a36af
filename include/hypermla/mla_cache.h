// What a serving engine does around attention with Multi-head Latent Attention: it writes new tokens to the paged
// cache, merges partial results, makes keys and values of a prefix that many requests share, and finds in each step who
// shares it.
//
//   hypermla::MlaCacheOps ops;                                                // compiles and loads, once
//   ops.append({.latent = .., .rope = .., .slots = .., .cache = ..}, stream);
//
// Tensors have the tokens first and lie in the device's memory, at the caller's addresses, by the caller's strides of
// 64 bits. Strides count elements. Elements of 16 bits lie densely in the innermost dimension, their strides are
// multiples of 8, and their addresses are aligned to 16 bytes. A call neither allocates, nor synchronises, nor reads
// back; it may be captured in a CUDA graph, and the contents of all tensors may change between replays, which last no
// longer than the object. No tokens or no heads is no error: nothing is done. On a CPU the work is done when a call
// returns.
#pragma once

#include <cstdint>
#include <memory>

#include "hypermla/hypermla.h"
#include "hypermla/mla_cache_format.h"

namespace hypermla {

// [tokens, heads, ..]; T: void for elements of 16 bits, float for a log-sum-exp [tokens, heads].
template <class T>
struct MlaRows {
  T* data = nullptr;
  std::int64_t token_stride = 0, head_stride = 0;
};

// A paged cache, its 512 latent and 64 rotary columns apart or in one row. A cache in FP8 is `latent` alone, and its
// strides count bytes, multiples of 16.
struct MlaCache {
  void* latent = nullptr;  // [pages, page, 512], or [pages, page, 656 or 576] bytes
  void* rope = nullptr;    // [pages, page, 64]
  std::int64_t latent_page_stride = 0, latent_token_stride = 0, rope_page_stride = 0, rope_token_stride = 0;
  std::int64_t pages = 0;
  int page = 64;                                       // tokens of a page, any number
  MlaCacheFormat format = MlaCacheFormat::as_queries;  // append() writes all, the others read no FP8

  // [pages, page, 576], or bytes [pages, page, 656 or 576], dense.
  HYPERMLA_API static MlaCache fused(void* data, std::int64_t pages, int page,
                                     MlaCacheFormat format = MlaCacheFormat::as_queries);
};

class HYPERMLA_API MlaCacheOps {
 public:
  // Two attentions of the same queries over different tokens, into one over all of them. A part whose log-sum-exp is
  // infinite, of either sign, is empty: it changes nothing, and its o is not read. Where both are empty, o is 0.
  // The result may lie where one of the parts does, at the same address and by the same strides; otherwise it must not
  // overlap them.
  struct Merge {
    struct Part {
      MlaRows<const void> o = {};     // [tokens, heads, width]
      MlaRows<const float> lse = {};  // [tokens, heads]
    };
    Part a = {}, b = {};
    MlaRows<void> o = {};
    MlaRows<float> lse = {};  // no data: not wanted
    int tokens = 0, heads = 0;
    int width = 512;                  // a multiple of 8, at most 512
    bool lse_base2 = false;           // log-sum-exps are in base 2 instead of natural
    bool empty_lse_positive = false;  // where both are empty, the log-sum-exp becomes +infinity instead of -infinity
  };

  // New tokens into the cache: row i goes to slot slots[i], that is page slots[i] / page, token slots[i] % page. Rows
  // of slot -1 are skipped. So is, on a GPU, every slot that the cache does not have, without a report; on a CPU it
  // throws Error before anything is written. Of rows with one slot any may win.
  //
  // Into a cache of 656 bytes a token: a factor is the largest magnitude of its 128 values / 448, at least 2^-126, and
  // a value is divided by it and rounded to e4m3, to nearest and ties to even. NaN stays NaN and leaves its
  // neighbours alone; an infinity makes NaN of the 128 values. Rotary columns become bfloat16.
  //
  // Into a cache of 576 bytes a token: a value, also a rotary one, is divided by the cache's factor and rounded to
  // e4m3, to nearest and ties to even; a quotient beyond 448, infinity included, becomes 448. NaN stays NaN.
  struct Append {
    const void* latent = nullptr;                     // [tokens, 512]
    const void* rope = nullptr;                       // [tokens, 64]
    std::int64_t latent_stride = 0, rope_stride = 0;  // from a token to the next
    const std::int64_t* slots = nullptr;              // [tokens]
    int tokens = 0;
    MlaCache cache = {};
    const float* cache_scale = nullptr;  // float [1] on the device, positive, of fp8_576 only: the factor
  };

  // Keys k = z W_UK^T and values v = z W_UV of the first `tokens` tokens of a request, for all heads. Table entries
  // that name no page of the cache count as zeros on a GPU; on a CPU they throw Error.
  struct Decompress {
    MlaCache cache = {};
    const int* block_table = nullptr;  // [pages of the tokens]: the request's row
    int tokens = 0;
    int heads = 0;
    // Either of the two inner strides is 1.
    struct Weights {
      const void* data = nullptr;
      std::int64_t head_stride = 0, row_stride = 0, column_stride = 0;
    };
    Weights w_uk = {};          // [heads, 128, 512]
    Weights w_uv = {};          // [heads, 512, 128]
    MlaRows<void> k = {};       // [tokens, heads, 128]
    MlaRows<void> k_rope = {};  // [tokens, heads, 64]: the rotary part, the same for each head; no data: not wanted
    MlaRows<void> v = {};       // [tokens, heads, 128]
  };

  // A prefix whose keys and values are kept decompressed, in the device's memory.
  struct Prefix {
    int pages = 0;          // whole ones; 0: there is none
    int first_token = 0;    // of its keys and values among those of all prefixes, which do not overlap
    int least_queries = 0;  // of a step that share it, below which it is left alone
    int valid = 0;          // whether keys and values are those of the pages: split_prefixes() makes it 0
  };
  static constexpr int kMaxPrefixes = 16;

  // Divides the requests of a step that decode between kept prefixes, for MlaPrefill to attend to, and the tokens
  // behind them, for MlaDecode (docs/prefix-cache.md). A request shares the longest valid prefix whose pages its
  // block table begins with, if all of their tokens come before its queries. It may lie anywhere in the batch.
  //
  // Keys and values are valid until a step writes to the pages, so every step that writes to the cache comes by, with
  // the slots that it writes; what it writes to is not valid in the same step any more.
  struct Split {
    const int* block_table = nullptr;  // [requests, width] pages
    std::int64_t table_stride = 0;     // from a request to the next
    int width = 0;
    const int* lengths = nullptr;         // [requests] tokens, the step's included; 0: it shares nothing
    const int* query_starts = nullptr;    // [requests + 1]
    int requests = 0;                     // those that decode; the step's others count by their slots alone
    const std::int64_t* slots = nullptr;  // [tokens] of all requests, as append() has them; others are no slots
    int tokens = 0;
    int page = 64;
    Prefix* prefixes = nullptr;         // [count]
    const int* prefix_pages = nullptr;  // [count, pages]
    std::int64_t prefix_pages_stride = 0;
    int count = 0;                     // at most kMaxPrefixes; 0: tables and lengths are copied
    const unsigned* owners = nullptr;  // [pages of the cache]: bit p says that a page belongs to prefix p
    std::int64_t cache_pages = 0;
    unsigned* found = nullptr;  // [requests], for the call itself
    // What is written. Of a block table only entries of the own tokens.
    int* own_table = nullptr;  // [requests, width]: pages behind the prefix
    std::int64_t own_table_stride = 0;
    int* own_lengths = nullptr;  // [requests]: tokens behind the prefix
    // For MlaPrefill::plan() of 2 count - 1 requests: the prefixes by rising first_token, places that hold none before
    // them, and what lies between.
    int* shared_query_starts = nullptr;  // [2 count]
    int* shared_token_starts = nullptr;  // [2 count]
    int* query_rows = nullptr;           // [queries]: those that share a prefix, prefix by prefix; the rest is left
  };

  // `dtype`: of all 16-bit tensors, bfloat16 or float16. Compiles (or finds in the cache) and loads the kernels.
  explicit MlaCacheOps(DType dtype = DType::bfloat16, const DeviceHandle& device = DeviceHandle());
  ~MlaCacheOps();
  MlaCacheOps(MlaCacheOps&&) noexcept;
  MlaCacheOps& operator=(MlaCacheOps&&) noexcept;

  // They throw Error for arguments that they cannot take, before anything is launched. One thread at a time.
  void merge_states(const Merge& with, void* stream = nullptr);
  void append(const Append& with, void* stream = nullptr);
  void decompress_prefix(const Decompress& with, void* stream = nullptr);
  void split_prefixes(const Split& with, void* stream = nullptr);

 private:
  struct State;
  Owned<State> state_;
};

}  // namespace hypermla
