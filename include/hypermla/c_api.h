/* HyperMLA's C interface, for programs in C and for languages that call C (ctypes, Rust): decoding as mla_decode.h has
 * it, prefill as mla_prefill.h, and what is around them as mla_cache.h, behind opaque handles.
 *
 *   hypermla_decode_options options;
 *   hypermla_decode_options_init(&options, sizeof options);
 *   options.heads = 128;
 *   options.max_requests = 256;
 *   hypermla_decode* decode;
 *   if (hypermla_decode_create(&options, "cuda:0", NULL, &decode) != HYPERMLA_OK) puts(hypermla_last_error());
 *   hypermla_decode_plan(decode, lengths, query_starts, requests, stream);      once per step
 *   hypermla_decode_run(decode, &tensors, stream);                              once per layer
 *   hypermla_decode_destroy(decode);
 *
 * No function throws. Those that return a status leave a sentence in hypermla_last_error() where it is not HYPERMLA_OK,
 * and change nothing then. One handle is used by one thread at a time.
 *
 * Structs begin with their size, by which they may grow: hypermla_*_init() sets it and gives every member a default. A
 * program that was built with an older header keeps working. One built with a newer header is told so if it sets a
 * member that this library does not know.
 */
#ifndef HYPERMLA_C_API_H
#define HYPERMLA_C_API_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define HYPERMLA_C_API __attribute__((visibility("default")))
#else
#define HYPERMLA_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum hypermla_status {
  HYPERMLA_OK = 0,
  HYPERMLA_ERROR = 1, /* an argument is wrong, or this machine cannot do it: the sentence says what to do next */
  HYPERMLA_OUT_OF_MEMORY = 2, /* of the host; for want of a GPU's memory HYPERMLA_ERROR names the size */
  HYPERMLA_INTERNAL = 3       /* a bug of the library */
} hypermla_status;

typedef enum hypermla_dtype { HYPERMLA_BFLOAT16 = 0, HYPERMLA_FLOAT16 = 1 } hypermla_dtype;

/* MlaCacheFormat of mla_cache_format.h: how a token lies in a cache. */
typedef enum hypermla_cache_format {
  HYPERMLA_CACHE_AS_QUERIES = 0,
  HYPERMLA_CACHE_FP8_656 = 1,
  HYPERMLA_CACHE_FP8_576 = 2
} hypermla_cache_format;

/* Members, limits and defaults are those of MlaDecodeOptions in mla_decode.h; flags are 0 or 1. */
typedef struct hypermla_decode_options {
  size_t size; /* of this struct in bytes */
  int32_t heads;
  int32_t max_requests;
  int32_t max_queries;
  int32_t max_query_tokens;
  int32_t max_tokens;
  int32_t page;
  int32_t dtype; /* a hypermla_dtype */
  int32_t causal;
  float scale;
  int32_t split;
  int32_t lse_base2;
  int32_t empty_lse_positive;
  const char* kernel; /* NULL or "": the one that suits the capacity */
  int32_t sparse;
  int32_t cache_format; /* a hypermla_cache_format */
  int32_t shards;
  int32_t shard;
  int32_t interleave;
  int32_t shared_prefixes;
  int32_t fp8_queries;
  int32_t reserved; /* 0; so that a member which a later version adds makes the struct larger */
} hypermla_decode_options;

/* The tensors of one layer: members and their rules are those of MlaDecodeTensors in mla_decode.h. Strides count
 * elements, those of a cache and of queries in FP8 bytes. Where attention is sparse block_table holds slots, int32
 * [queries, max_tokens]. */
typedef struct hypermla_decode_tensors {
  size_t size; /* of this struct in bytes */
  const void* q_latent;
  int64_t q_latent_token_stride;
  int64_t q_latent_head_stride;
  const void* q_rope;
  int64_t q_rope_token_stride;
  int64_t q_rope_head_stride;
  int64_t query_tokens;
  const void* cache_latent;
  int64_t latent_page_stride;
  int64_t latent_token_stride;
  const void* cache_rope;
  int64_t rope_page_stride;
  int64_t rope_token_stride;
  int64_t pages;
  const int32_t* block_table;
  int64_t table_stride;
  void* o;
  int64_t o_token_stride;
  int64_t o_head_stride;
  float* lse;
  int64_t lse_token_stride;
  int64_t lse_head_stride;
  int64_t lse_request_stride;
  const float* sinks;
  const float* cache_scale;
  const float* q_scale;
} hypermla_decode_tensors;

typedef struct hypermla_decode hypermla_decode;

/* "0.1.0" */
HYPERMLA_C_API const char* hypermla_version(void);

/* What was wrong in the last call of this thread that did not return HYPERMLA_OK; "" before the first. It stays until
 * the next such call of this thread. */
HYPERMLA_C_API const char* hypermla_last_error(void);

/* Sets the size to `size` and all members to their defaults; those of tensors are NULL and 0. */
HYPERMLA_C_API void hypermla_decode_options_init(hypermla_decode_options* options, size_t size);
HYPERMLA_C_API void hypermla_decode_tensors_init(hypermla_decode_tensors* tensors, size_t size);

/* Queries [tokens, heads, 576], a cache [pages, page, 576] and outputs [tokens, heads, 512] and [tokens, heads], all
 * dense: sets the members that describe them in initialised tensors; block_table and table_stride are the caller's. */
HYPERMLA_C_API hypermla_status hypermla_decode_tensors_fused(hypermla_decode_tensors* tensors, int32_t heads,
                                                             int32_t page, const void* q, int64_t query_tokens,
                                                             const void* cache, int64_t pages, void* o, float* lse);
/* The same with a cache of bytes: [pages, page, 656] for HYPERMLA_CACHE_FP8_656 or, with its cache_scale, [pages, page,
 * 576] for HYPERMLA_CACHE_FP8_576. Where queries are in FP8, too, q_rope is 512 bytes behind q: set it afterwards. */
HYPERMLA_C_API hypermla_status hypermla_decode_tensors_fused_fp8(hypermla_decode_tensors* tensors, int32_t heads,
                                                                 int32_t page, const void* q, int64_t query_tokens,
                                                                 const void* cache, int64_t pages,
                                                                 const float* cache_scale, void* o, float* lse);

/* `device`: "cpu", "cuda", "cuda:1", or "auto" (as NULL): the first GPU, else the CPU. `workspace`: as many bytes of
 * the device's memory as hypermla_decode_workspace_bytes() says, aligned to 256, which the caller owns and no other
 * work uses between a plan and the last run after it; NULL: memory of its own. Takes seconds where kernels are not in
 * the cache and have to be compiled. */
HYPERMLA_C_API hypermla_status hypermla_decode_create(const hypermla_decode_options* options, const char* device,
                                                      void* workspace, hypermla_decode** decode);
HYPERMLA_C_API hypermla_status hypermla_decode_workspace_bytes(const hypermla_decode_options* options,
                                                               const char* device, size_t* bytes);
/* MlaDecode::fixed_split(): the least `split` for these options whose workspace takes at most `bytes`. */
HYPERMLA_C_API hypermla_status hypermla_decode_fixed_split(const hypermla_decode_options* options, size_t bytes,
                                                           const char* device, int32_t* split);
/* NULL is allowed. Work that was enqueued must be done. */
HYPERMLA_C_API void hypermla_decode_destroy(hypermla_decode* decode);

/* MlaDecode::plan(), run() and check(). lengths: int32 [requests], or NULL for max_tokens of each where attention is
 * sparse; query_starts: int32 [requests + 1], or NULL for max_queries of each request; both in the device's memory.
 * `stream` is a CUstream or cudaStream_t; NULL is the default stream. plan and run neither allocate nor synchronise,
 * and may be captured in a CUDA graph. check waits for the device. */
HYPERMLA_C_API hypermla_status hypermla_decode_plan(hypermla_decode* decode, const int32_t* lengths,
                                                    const int32_t* query_starts, int32_t requests, void* stream);
/* The same with shared_prefixes: the block table and its stride as hypermla_decode_run() will get them. */
HYPERMLA_C_API hypermla_status hypermla_decode_plan_shared(hypermla_decode* decode, const int32_t* lengths,
                                                           const int32_t* query_starts, int32_t requests,
                                                           const int32_t* block_table, int64_t table_stride,
                                                           void* stream);
/* With query_tokens 0, as initialised tensors have it, nothing is done. */
HYPERMLA_C_API hypermla_status hypermla_decode_run(hypermla_decode* decode, const hypermla_decode_tensors* tensors,
                                                   void* stream);
HYPERMLA_C_API hypermla_status hypermla_decode_check(hypermla_decode* decode);

/* Which kernel runs, and why. The text is the handle's. */
HYPERMLA_C_API hypermla_status hypermla_decode_explain(hypermla_decode* decode, const char** text);

/* Prefill. Members, limits and defaults are those of MlaPrefillOptions in mla_prefill.h; flags are 0 or 1. */
typedef struct hypermla_prefill_options {
  size_t size; /* of this struct in bytes */
  int32_t heads;
  int32_t max_requests;
  int32_t max_query_tokens;
  int32_t max_tokens;
  int32_t dtype; /* a hypermla_dtype */
  int32_t causal;
  float scale;
  int32_t lse_base2;
  int32_t empty_lse_positive;
  int32_t accumulate;
  int32_t batch_invariant;
  int32_t query_rows;
} hypermla_prefill_options;

/* The tensors of one layer: members and their rules are those of MlaPrefillTensors in mla_prefill.h. Strides count
 * elements. */
typedef struct hypermla_prefill_tensors {
  size_t size; /* of this struct in bytes */
  const void* q_nope;
  int64_t q_nope_token_stride;
  int64_t q_nope_head_stride;
  const void* q_rope;
  int64_t q_rope_token_stride;
  int64_t q_rope_head_stride;
  int64_t query_tokens;
  const void* k_nope;
  int64_t k_nope_token_stride;
  int64_t k_nope_head_stride;
  const void* k_rope;
  int64_t k_rope_token_stride;
  int64_t k_rope_head_stride;
  const void* v;
  int64_t v_token_stride;
  int64_t v_head_stride;
  int64_t tokens;
  void* o;
  int64_t o_token_stride;
  int64_t o_head_stride;
  float* lse;
  int64_t lse_token_stride;
  int64_t lse_head_stride;
} hypermla_prefill_tensors;

typedef struct hypermla_prefill hypermla_prefill;

HYPERMLA_C_API void hypermla_prefill_options_init(hypermla_prefill_options* options, size_t size);
HYPERMLA_C_API void hypermla_prefill_tensors_init(hypermla_prefill_tensors* tensors, size_t size);

/* Queries [query_tokens, heads, 192], keys [tokens, heads, 192], values [tokens, heads, 128], outputs [query_tokens,
 * heads, 128] and [query_tokens, heads], all dense: sets all members of initialised tensors. */
HYPERMLA_C_API hypermla_status hypermla_prefill_tensors_dense(hypermla_prefill_tensors* tensors, int32_t heads,
                                                              const void* q, int64_t query_tokens, const void* k,
                                                              const void* v, int64_t tokens, void* o, float* lse);

/* As those of decoding. */
HYPERMLA_C_API hypermla_status hypermla_prefill_create(const hypermla_prefill_options* options, const char* device,
                                                       void* workspace, hypermla_prefill** prefill);
HYPERMLA_C_API hypermla_status hypermla_prefill_workspace_bytes(const hypermla_prefill_options* options,
                                                                const char* device, size_t* bytes);
HYPERMLA_C_API void hypermla_prefill_destroy(hypermla_prefill* prefill);

/* MlaPrefill::plan(), run() and check(). query_starts and token_starts: int32 [requests + 1] in the device's memory,
 * where each request begins and where the last one ends. */
HYPERMLA_C_API hypermla_status hypermla_prefill_plan(hypermla_prefill* prefill, const int32_t* query_starts,
                                                     const int32_t* token_starts, int32_t requests, void* stream);
/* With the option query_rows: int32, where each query of the plan lies in q, o and lse. */
HYPERMLA_C_API hypermla_status hypermla_prefill_plan_rows(hypermla_prefill* prefill, const int32_t* query_starts,
                                                          const int32_t* token_starts, const int32_t* query_rows,
                                                          int32_t requests, void* stream);
HYPERMLA_C_API hypermla_status hypermla_prefill_run(hypermla_prefill* prefill, const hypermla_prefill_tensors* tensors,
                                                    void* stream);
HYPERMLA_C_API hypermla_status hypermla_prefill_check(hypermla_prefill* prefill);
HYPERMLA_C_API hypermla_status hypermla_prefill_explain(hypermla_prefill* prefill, const char** text);

/* What an engine does around attention. Members and their rules are those of MlaCacheOps in mla_cache.h; strides count
 * elements, flags are 0 or 1, and members that are left at their defaults of NULL and 0 are those that a call may do
 * without: the log-sum-exps and RoPE keys that are written. */

/* MlaCacheOps::Append: new tokens into the paged cache. */
typedef struct hypermla_append_arguments {
  size_t size;        /* of this struct in bytes */
  const void* latent; /* [tokens, 512] */
  int64_t latent_stride;
  const void* rope; /* [tokens, 64] */
  int64_t rope_stride;
  const int64_t* slots; /* [tokens] */
  int64_t tokens;
  void* cache_latent; /* [pages, page, 512] */
  int64_t latent_page_stride;
  int64_t latent_token_stride;
  void* cache_rope; /* [pages, page, 64] */
  int64_t rope_page_stride;
  int64_t rope_token_stride;
  int64_t pages;
  int64_t page;         /* by default 64 */
  int32_t cache_format; /* a hypermla_cache_format; in FP8 the strides of the cache count bytes */
  const float* cache_scale;
} hypermla_append_arguments;

/* MlaCacheOps::Merge: two attentions, a and b, of the same queries over different tokens, into one. */
typedef struct hypermla_merge_arguments {
  size_t size;     /* of this struct in bytes */
  const void* a_o; /* [tokens, heads, width], as b_o and o */
  int64_t a_o_token_stride;
  int64_t a_o_head_stride;
  const float* a_lse; /* [tokens, heads], as b_lse and lse */
  int64_t a_lse_token_stride;
  int64_t a_lse_head_stride;
  const void* b_o;
  int64_t b_o_token_stride;
  int64_t b_o_head_stride;
  const float* b_lse;
  int64_t b_lse_token_stride;
  int64_t b_lse_head_stride;
  void* o;
  int64_t o_token_stride;
  int64_t o_head_stride;
  float* lse; /* NULL: not wanted */
  int64_t lse_token_stride;
  int64_t lse_head_stride;
  int64_t tokens;
  int64_t heads;
  int64_t width; /* by default 512 */
  int32_t lse_base2;
  int32_t empty_lse_positive;
} hypermla_merge_arguments;

/* MlaCacheOps::Decompress: keys and values of the first tokens of a request, for all heads. */
typedef struct hypermla_decompress_arguments {
  size_t size;              /* of this struct in bytes */
  const void* cache_latent; /* [pages, page, 512] */
  int64_t latent_page_stride;
  int64_t latent_token_stride;
  const void* cache_rope; /* [pages, page, 64] */
  int64_t rope_page_stride;
  int64_t rope_token_stride;
  int64_t pages;
  int64_t page;               /* by default 64 */
  const int32_t* block_table; /* [pages of the tokens] */
  int64_t tokens;
  int64_t heads;
  const void* w_uk; /* [heads, 128, 512] */
  int64_t w_uk_head_stride;
  int64_t w_uk_row_stride;
  int64_t w_uk_column_stride;
  const void* w_uv; /* [heads, 512, 128] */
  int64_t w_uv_head_stride;
  int64_t w_uv_row_stride;
  int64_t w_uv_column_stride;
  void* k; /* [tokens, heads, 128] */
  int64_t k_token_stride;
  int64_t k_head_stride;
  void* k_rope; /* [tokens, heads, 64]; NULL: not wanted */
  int64_t k_rope_token_stride;
  int64_t k_rope_head_stride;
  void* v; /* [tokens, heads, 128] */
  int64_t v_token_stride;
  int64_t v_head_stride;
} hypermla_decompress_arguments;

/* MlaCacheOps::Prefix: a prefix whose keys and values are kept decompressed, in the device's memory. */
typedef struct hypermla_prefix {
  int32_t pages;
  int32_t first_token;
  int32_t least_queries;
  int32_t valid;
} hypermla_prefix;

/* MlaCacheOps::Split: the requests of a step, divided between kept prefixes and their own tokens. */
typedef struct hypermla_split_arguments {
  size_t size;                /* of this struct in bytes */
  const int32_t* block_table; /* [requests, width] */
  int64_t table_stride;
  int64_t width;
  const int32_t* lengths;      /* [requests] */
  const int32_t* query_starts; /* [requests + 1] */
  int64_t requests;
  const int64_t* slots; /* [tokens] */
  int64_t tokens;
  int64_t page;                /* by default 64 */
  hypermla_prefix* prefixes;   /* [count], aligned to 16 bytes */
  const int32_t* prefix_pages; /* [count, pages] */
  int64_t prefix_pages_stride;
  int64_t count;
  const uint32_t* owners; /* [cache_pages] */
  int64_t cache_pages;
  uint32_t* found;    /* [requests] */
  int32_t* own_table; /* [requests, width] */
  int64_t own_table_stride;
  int32_t* own_lengths;         /* [requests] */
  int32_t* shared_query_starts; /* [2 count] */
  int32_t* shared_token_starts; /* [2 count] */
  int32_t* query_rows;          /* [queries] */
} hypermla_split_arguments;

HYPERMLA_C_API void hypermla_append_arguments_init(hypermla_append_arguments* arguments, size_t size);
HYPERMLA_C_API void hypermla_merge_arguments_init(hypermla_merge_arguments* arguments, size_t size);
HYPERMLA_C_API void hypermla_decompress_arguments_init(hypermla_decompress_arguments* arguments, size_t size);
HYPERMLA_C_API void hypermla_split_arguments_init(hypermla_split_arguments* arguments, size_t size);

/* A cache [pages, page, 576], or of the append arguments' cache_format, all dense: sets the members that describe it in
 * initialised arguments. */
HYPERMLA_C_API hypermla_status hypermla_append_arguments_fused(hypermla_append_arguments* arguments, void* cache,
                                                               int64_t pages, int64_t page);
HYPERMLA_C_API hypermla_status hypermla_decompress_arguments_fused(hypermla_decompress_arguments* arguments,
                                                                   const void* cache, int64_t pages, int64_t page);

typedef struct hypermla_cache_ops hypermla_cache_ops;

/* dtype: a hypermla_dtype, of all 16-bit tensors. */
HYPERMLA_C_API hypermla_status hypermla_cache_ops_create(int32_t dtype, const char* device, hypermla_cache_ops** ops);
HYPERMLA_C_API void hypermla_cache_ops_destroy(hypermla_cache_ops* ops);

/* MlaCacheOps::append(), merge_states(), decompress_prefix() and split_prefixes(). */
HYPERMLA_C_API hypermla_status hypermla_append(hypermla_cache_ops* ops, const hypermla_append_arguments* arguments,
                                               void* stream);
HYPERMLA_C_API hypermla_status hypermla_merge_states(hypermla_cache_ops* ops, const hypermla_merge_arguments* arguments,
                                                     void* stream);
HYPERMLA_C_API hypermla_status hypermla_decompress_prefix(hypermla_cache_ops* ops,
                                                          const hypermla_decompress_arguments* arguments, void* stream);
HYPERMLA_C_API hypermla_status hypermla_split_prefixes(hypermla_cache_ops* ops,
                                                       const hypermla_split_arguments* arguments, void* stream);

#ifdef __cplusplus
}
#endif
#endif
