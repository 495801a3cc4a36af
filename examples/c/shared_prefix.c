/* Decoding of requests that share a prefix in C: tokens are appended to the cache, keys and values of the prefix are
 * decompressed, the rest of each request is decoded from its latent cache, and the two attentions become one. It runs
 * on the CPU, so it needs no CUDA calls for memory; on a GPU the pointers are the device's, and calls take a stream.
 *
 * Queries are zeros, so that every token has the same weight and outputs are means. */
#include <hypermla/c_api.h>

#include <stdio.h>
#include <stdlib.h>

enum { kHeads = 2, kPage = 16, kPages = 8, kPrefix = 48, kQueries = 3, kTokens = kPrefix + 16 + 16 };
enum { kOne = 0x3f80, kThree = 0x4040, kFive = 0x40a0 }; /* bfloat16 */

static uint16_t rows[kTokens * 576], cache[kPages * kPage * 576];
static uint16_t w_uk[kHeads * 128 * 512], w_uv[kHeads * 512 * 128];
static uint16_t k[kPrefix * kHeads * 192], v[kPrefix * kHeads * 128];
static uint16_t q_latent[kQueries * kHeads * 576], q[kQueries * kHeads * 192];
static uint16_t latent[kQueries * kHeads * 512], o[kQueries * kHeads * 128];
static float lse[kQueries * kHeads];

static void require(hypermla_status status) {
  if (status == HYPERMLA_OK) return;
  fprintf(stderr, "%s\n", hypermla_last_error());
  exit(1);
}

int main(void) {
  /* The prefix is in pages 5, 2 and 7; requests have page 0 and page 4, and 1 and 2 queries. */
  const int32_t prefix_pages[] = {5, 2, 7}, own_pages[] = {0, 4}, own[] = {16, 16}, query_starts[] = {0, 1, 3};
  int64_t slots[kTokens];
  for (int i = 0; i < kTokens; ++i) {
    const int page = i < kPrefix ? prefix_pages[i / kPage] : own_pages[(i - kPrefix) / kPage];
    slots[i] = (int64_t)page * kPage + i % kPage;
    for (int c = 0; c < 576; ++c) rows[i * 576 + c] = i < kPrefix ? kOne : i < kPrefix + 16 ? kThree : kFive;
  }
  for (int head = 0; head < kHeads; ++head) /* values are the first 128 latent columns */
    for (int d = 0; d < 128; ++d) w_uv[(head * 512 + d) * 128 + d] = kOne;

  hypermla_cache_ops* ops = NULL;
  require(hypermla_cache_ops_create(HYPERMLA_BFLOAT16, "cpu", &ops));
  hypermla_append_arguments append;
  hypermla_append_arguments_init(&append, sizeof append);
  append.latent = rows;
  append.rope = rows + 512;
  append.latent_stride = append.rope_stride = 576;
  append.slots = slots;
  append.tokens = kTokens;
  require(hypermla_append_arguments_fused(&append, cache, kPages, kPage));
  require(hypermla_append(ops, &append, NULL));

  hypermla_decompress_arguments decompress; /* once for a prefix */
  hypermla_decompress_arguments_init(&decompress, sizeof decompress);
  require(hypermla_decompress_arguments_fused(&decompress, cache, kPages, kPage));
  decompress.block_table = prefix_pages;
  decompress.tokens = kPrefix;
  decompress.heads = kHeads;
  decompress.w_uk = w_uk;
  decompress.w_uk_head_stride = 128 * 512;
  decompress.w_uk_row_stride = 512;
  decompress.w_uk_column_stride = 1;
  decompress.w_uv = w_uv;
  decompress.w_uv_head_stride = 512 * 128;
  decompress.w_uv_row_stride = 128;
  decompress.w_uv_column_stride = 1;
  decompress.k = k;
  decompress.k_rope = k + 128;
  decompress.k_token_stride = decompress.k_rope_token_stride = kHeads * 192;
  decompress.k_head_stride = decompress.k_rope_head_stride = 192;
  decompress.v = v;
  decompress.v_token_stride = kHeads * 128;
  decompress.v_head_stride = 128;
  require(hypermla_decompress_prefix(ops, &decompress, NULL));

  hypermla_decode_options of_decode;
  hypermla_decode_options_init(&of_decode, sizeof of_decode);
  of_decode.heads = kHeads;
  of_decode.max_requests = 4;
  of_decode.max_queries = 2;
  of_decode.page = kPage;
  of_decode.causal = 0; /* so that both queries of a request have the same mean */
  hypermla_decode* decode = NULL;
  require(hypermla_decode_create(&of_decode, "cpu", NULL, &decode));
  hypermla_prefill_options of_prefix;
  hypermla_prefill_options_init(&of_prefix, sizeof of_prefix);
  of_prefix.heads = kHeads;
  of_prefix.max_query_tokens = 8;
  of_prefix.causal = 0;
  of_prefix.accumulate = 1;
  hypermla_prefill* prefix = NULL;
  require(hypermla_prefill_create(&of_prefix, "cpu", NULL, &prefix));

  /* Once per step. */
  const int32_t all_queries[] = {0, kQueries}, prefix_starts[] = {0, kPrefix};
  require(hypermla_decode_plan(decode, own, query_starts, 2, NULL));
  require(hypermla_prefill_plan(prefix, all_queries, prefix_starts, 1, NULL));

  /* Once per layer. */
  hypermla_decode_tensors tensors;
  hypermla_decode_tensors_init(&tensors, sizeof tensors);
  require(hypermla_decode_tensors_fused(&tensors, kHeads, kPage, q_latent, kQueries, cache, kPages, latent, lse));
  tensors.block_table = own_pages;
  tensors.table_stride = 1;
  require(hypermla_decode_run(decode, &tensors, NULL));
  for (int row = 0; row < kQueries * kHeads; ++row) /* the engine's product with w_uv */
    for (int d = 0; d < 128; ++d) o[row * 128 + d] = latent[row * 512 + d];
  hypermla_prefill_tensors of_layer;
  hypermla_prefill_tensors_init(&of_layer, sizeof of_layer);
  require(hypermla_prefill_tensors_dense(&of_layer, kHeads, q, kQueries, k, v, kPrefix, o, lse));
  require(hypermla_prefill_run(prefix, &of_layer, NULL));

  /* ln 64, and the means (48 * 1 + 16 * 3) / 64 = 1.5 and (48 * 1 + 16 * 5) / 64 = 2, as bfloat16. */
  printf("lse %.4f, o %04x %04x\n", lse[0], (unsigned)o[0], (unsigned)o[2 * kHeads * 128]);
  hypermla_prefill_destroy(prefix);
  hypermla_decode_destroy(decode);
  hypermla_cache_ops_destroy(ops);
  return 0;
}
