/* A step of a serving engine in C, the one of examples/cpp/decode.cpp: two requests, one with a draft, over a paged
 * cache. It runs on the CPU, so it needs no CUDA calls for memory; on a GPU the pointers are the device's, and plan and
 * run take a stream. */
#include <hypermla/c_api.h>

#include <stdio.h>
#include <stdlib.h>

enum { kHeads = 16, kPage = 64, kPages = 8, kLayers = 3, kQueries = 3 };

static uint16_t q[kQueries * kHeads * 576], cache[kPages * kPage * 576], o[kQueries * kHeads * 512];
static float lse[kQueries * kHeads];

static void require(hypermla_status status) {
  if (status == HYPERMLA_OK) return;
  fprintf(stderr, "%s\n", hypermla_last_error());
  exit(1);
}

int main(void) {
  /* Requests of 100 and 30 tokens, the new ones included; the first has 2 queries. Pages 5, 2 and 7 of each layer's
   * cache. */
  const int32_t lengths[] = {100, 30}, query_starts[] = {0, 2, 3}, block_table[] = {5, 2, 7, 0};
  for (size_t i = 0; i < sizeof q / sizeof *q; ++i) q[i] = 0x3f80;             /* 1.0 in bfloat16 */
  for (size_t i = 0; i < sizeof cache / sizeof *cache; ++i) cache[i] = 0x3c00; /* 2^-7; append() of an engine */

  hypermla_decode_options options;
  hypermla_decode_options_init(&options, sizeof options);
  options.heads = kHeads;
  options.max_requests = 4;
  options.max_queries = 2;
  options.max_tokens = 256;
  options.page = kPage;
  hypermla_decode* decode = NULL;
  require(hypermla_decode_create(&options, "cpu", NULL, &decode));
  const char* text = NULL;
  require(hypermla_decode_explain(decode, &text));
  printf("HyperMLA %s, %s\n", hypermla_version(), text);

  hypermla_decode_tensors tensors;
  hypermla_decode_tensors_init(&tensors, sizeof tensors);
  tensors.block_table = block_table;
  tensors.table_stride = 2;
  require(hypermla_decode_plan(decode, lengths, query_starts, 2, NULL));
  for (int layer = 0; layer < kLayers; ++layer) {
    require(hypermla_decode_tensors_fused(&tensors, kHeads, kPage, q, kQueries, cache, kPages, o, lse));
    require(hypermla_decode_run(decode, &tensors, NULL));
  }
  printf("lse %.4f %.4f %.4f\n", lse[0], lse[kHeads], lse[2 * kHeads]); /* 0.3248 + ln of 99, 100 and 30 */
  hypermla_decode_destroy(decode);
  return 0;
}
