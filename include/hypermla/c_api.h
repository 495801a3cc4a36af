/* HyperMLA's C interface, for programs in C and for languages that call C (ctypes, Rust): decoding as mla_decode.h has
 * it, behind an opaque handle.
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
} hypermla_decode_options;

/* The tensors of one layer: members and their rules are those of MlaDecodeTensors in mla_decode.h. Strides count
 * elements. */
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

/* `device`: "cpu", "cuda", "cuda:1", or "auto" (as NULL): the first GPU, else the CPU. `workspace`: as many bytes of
 * the device's memory as hypermla_decode_workspace_bytes() says, aligned to 256, which the caller owns and no other
 * work uses between a plan and the last run after it; NULL: memory of its own. Takes seconds where kernels are not in
 * the cache and have to be compiled. */
HYPERMLA_C_API hypermla_status hypermla_decode_create(const hypermla_decode_options* options, const char* device,
                                                      void* workspace, hypermla_decode** decode);
HYPERMLA_C_API hypermla_status hypermla_decode_workspace_bytes(const hypermla_decode_options* options,
                                                               const char* device, size_t* bytes);
/* NULL is allowed. Work that was enqueued must be done. */
HYPERMLA_C_API void hypermla_decode_destroy(hypermla_decode* decode);

/* MlaDecode::plan(), run() and check(). lengths: int32 [requests]; query_starts: int32 [requests + 1], or NULL for
 * max_queries of each request; both in the device's memory. `stream` is a CUstream or cudaStream_t; NULL is the default
 * stream. plan and run neither allocate nor synchronise, and may be captured in a CUDA graph. check waits for the
 * device. */
HYPERMLA_C_API hypermla_status hypermla_decode_plan(hypermla_decode* decode, const int32_t* lengths,
                                                    const int32_t* query_starts, int32_t requests, void* stream);
HYPERMLA_C_API hypermla_status hypermla_decode_run(hypermla_decode* decode, const hypermla_decode_tensors* tensors,
                                                   void* stream);
HYPERMLA_C_API hypermla_status hypermla_decode_check(hypermla_decode* decode);

/* Which kernel runs, and why. The text is the handle's. */
HYPERMLA_C_API hypermla_status hypermla_decode_explain(hypermla_decode* decode, const char** text);

#ifdef __cplusplus
}
#endif
#endif
