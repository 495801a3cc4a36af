/* Sparse decoding over a cache in FP8, in C: new tokens are appended in DeepSeek's form of 656 bytes, then every query
 * attends to the tokens of its list. It runs on the CPU; on a GPU the pointers are the device's, and calls take a
 * stream. */
#include <hypermla/c_api.h>

#include <stdio.h>
#include <stdlib.h>

enum { kHeads = 16, kPage = 64, kPages = 2, kTokens = 100, kQueries = 2, kTopK = 8 };

static uint16_t rows[kTokens * 576], q[kQueries * kHeads * 576], o[kQueries * kHeads * 512];
static float lse[kQueries * kHeads], sinks[kHeads];
static int64_t places[kTokens];
static void* cache; /* [kPages, kPage, 656] bytes, aligned to 16 */

static void require(hypermla_status status) {
  if (status == HYPERMLA_OK) return;
  fprintf(stderr, "%s\n", hypermla_last_error());
  exit(1);
}

static void append(void) {
  hypermla_cache_ops* ops = NULL;
  hypermla_append_arguments with;
  require(hypermla_cache_ops_create(HYPERMLA_BFLOAT16, "cpu", &ops));
  hypermla_append_arguments_init(&with, sizeof with);
  with.cache_format = HYPERMLA_CACHE_FP8_656;
  require(hypermla_append_arguments_fused(&with, cache, kPages, kPage));
  with.latent = rows;
  with.rope = rows + 512;
  with.latent_stride = with.rope_stride = 576;
  with.slots = places;
  with.tokens = kTokens;
  require(hypermla_append(ops, &with, NULL));
  hypermla_cache_ops_destroy(ops);
}

int main(void) {
  /* An indexer's choice for two queries: slots are page * 64 + token in it, and a negative one is no token. The second
   * list is the longer one. */
  const int32_t slots[kQueries][kTopK] = {{110, 20, -1, 70, 64}, {40, 41, 42, 43, 44, 45, 46, 47}}, lengths[] = {5, 8};
  cache = aligned_alloc(16, kPages * kPage * 656);
  if (!cache) return 1;
  for (int t = 0; t < kTokens; ++t) places[t] = t + 20;
  for (int t = 0; t < kTokens; ++t) /* a latent vector of 2.0, from slot 64 on; before it of 1.0 */
    for (int c = 0; c < 512; ++c) rows[t * 576 + c] = places[t] < 64 ? 0x3f80 : 0x4000;
  append();

  hypermla_decode_options options;
  hypermla_decode_options_init(&options, sizeof options);
  options.heads = kHeads;
  options.max_requests = kQueries;
  options.max_tokens = kTopK;
  options.page = kPage;
  options.sparse = 1;
  options.cache_format = HYPERMLA_CACHE_FP8_656;
  hypermla_decode* decode = NULL;
  require(hypermla_decode_create(&options, "cpu", NULL, &decode));
  hypermla_decode_tensors tensors;
  hypermla_decode_tensors_init(&tensors, sizeof tensors);
  require(hypermla_decode_tensors_fused_fp8(&tensors, kHeads, kPage, q, kQueries, cache, kPages, NULL, o, lse));
  tensors.block_table = slots[0];
  tensors.table_stride = kTopK;
  for (int h = 0; h < kHeads; ++h) sinks[h] = h == 0 ? -1e30f : 0; /* of head 0 without effect */
  tensors.sinks = sinks;
  require(hypermla_decode_plan(decode, lengths, NULL, kQueries, NULL));
  require(hypermla_decode_run(decode, &tensors, NULL));
  /* Queries of zeros weigh all tokens the same: ln 4 and ln 8; (2 + 1 + 2 + 2) / 4 = 1.75, and 1. */
  printf("lse %.4f %.4f, o %04x %04x\n", lse[0], lse[kHeads], o[0], o[kHeads * 512]);
  hypermla_decode_destroy(decode);
  free(cache);
  return 0;
}
