#include "hypermla/c_api.h"

#include "hypermla/api/c_api_calls.h"
#include "hypermla/mla_decode.h"

struct hypermla_decode {
  hypermla::MlaDecode decode;
  std::string explanation;
};

namespace hypermla {
namespace {

static_assert(int(DType::bfloat16) == HYPERMLA_BFLOAT16 && int(DType::float16) == HYPERMLA_FLOAT16);

thread_local std::string t_last_error;

hypermla_decode_options default_options() {
  const MlaDecodeOptions at;
  return {sizeof(hypermla_decode_options),
          at.heads,
          at.max_requests,
          at.max_queries,
          at.max_query_tokens,
          at.max_tokens,
          at.page,
          std::int32_t(at.dtype),
          at.causal,
          at.scale,
          at.split,
          at.lse_base2,
          at.empty_lse_positive,
          nullptr,
          at.sparse,
          std::int32_t(at.cache_format),
          at.shards,
          at.shard,
          at.interleave,
          at.shared_prefixes,
          at.fp8_queries,
          0};
}

hypermla_decode_tensors tensors_of(const hypermla_decode_tensors* given) {
  return of_caller(given, {}, "tensors", "hypermla_decode_tensors_init");
}

MlaDecodeOptions options_of(const hypermla_decode_options* given) {
  static_assert(offsetof(hypermla_decode_options, reserved) + sizeof(std::int32_t) == sizeof(hypermla_decode_options));
  const hypermla_decode_options at = of_caller(given, default_options(), "options", "hypermla_decode_options_init");
  if (at.reserved) fail("options->reserved is {}; it must be 0", at.reserved);
  return {.heads = at.heads,
          .max_requests = at.max_requests,
          .max_queries = at.max_queries,
          .max_query_tokens = at.max_query_tokens,
          .max_tokens = at.max_tokens,
          .page = at.page,
          .dtype = dtype_of(at.dtype),
          .causal = flag_of("causal", at.causal),
          .sparse = flag_of("sparse", at.sparse),
          .cache_format = cache_format_of(at.cache_format),
          .fp8_queries = flag_of("fp8_queries", at.fp8_queries),
          .scale = at.scale,
          .split = at.split,
          .lse_base2 = flag_of("lse_base2", at.lse_base2),
          .empty_lse_positive = flag_of("empty_lse_positive", at.empty_lse_positive),
          .shards = at.shards,
          .shard = at.shard,
          .interleave = at.interleave,
          .shared_prefixes = flag_of("shared_prefixes", at.shared_prefixes),
          .kernel = at.kernel ? at.kernel : ""};
}

}  // namespace

// Where memory is short there may be none for the sentence.
hypermla_status failed(hypermla_status status, const char* what) noexcept {
  try {
    t_last_error = what;
  } catch (...) {
    t_last_error.clear();
  }
  return status;
}

}  // namespace hypermla

using namespace hypermla;

const char* hypermla_version(void) { return HYPERMLA_VERSION; }

const char* hypermla_last_error(void) { return t_last_error.c_str(); }

void hypermla_decode_options_init(hypermla_decode_options* options, size_t size) {
  initialise(options, default_options(), size);
}

void hypermla_decode_tensors_init(hypermla_decode_tensors* tensors, size_t size) { initialise(tensors, {}, size); }

namespace hypermla {
namespace {

hypermla_status set_fused(MlaCacheFormat format, const float* cache_scale, hypermla_decode_tensors* tensors, int heads,
                          int page, const void* q, std::int64_t query_tokens, const void* cache, std::int64_t pages,
                          void* o, float* lse) {
  return guarded_call([&] {
    hypermla_decode_tensors to = tensors_of(tensors);
    const MlaDecodeTensors from = MlaDecodeTensors::fused(heads, page, q, count_of("query_tokens", query_tokens), cache,
                                                          pages, nullptr, 0, o, lse, format);
    to.q_latent = from.q_latent.data;
    to.q_latent_token_stride = from.q_latent.token_stride;
    to.q_latent_head_stride = from.q_latent.head_stride;
    to.q_rope = from.q_rope.data;
    to.q_rope_token_stride = from.q_rope.token_stride;
    to.q_rope_head_stride = from.q_rope.head_stride;
    to.query_tokens = from.query_tokens;
    to.cache_latent = from.cache_latent;
    to.latent_page_stride = from.latent_page_stride;
    to.latent_token_stride = from.latent_token_stride;
    to.cache_rope = from.cache_rope;
    to.rope_page_stride = from.rope_page_stride;
    to.rope_token_stride = from.rope_token_stride;
    to.pages = from.pages;
    to.o = from.o;
    to.o_token_stride = from.o_token_stride;
    to.o_head_stride = from.o_head_stride;
    to.lse = from.lse;
    to.lse_token_stride = from.lse_token_stride;
    to.lse_head_stride = from.lse_head_stride;
    to.lse_request_stride = from.lse_request_stride;
    to.cache_scale = cache_scale;
    std::memcpy(tensors, &to, std::min(tensors->size, sizeof to));
  });
}

}  // namespace
}  // namespace hypermla

hypermla_status hypermla_decode_tensors_fused(hypermla_decode_tensors* tensors, int32_t heads, int32_t page,
                                              const void* q, int64_t query_tokens, const void* cache, int64_t pages,
                                              void* o, float* lse) {
  return set_fused(MlaCacheFormat::as_queries, nullptr, tensors, heads, page, q, query_tokens, cache, pages, o, lse);
}
hypermla_status hypermla_decode_tensors_fused_fp8(hypermla_decode_tensors* tensors, int32_t heads, int32_t page,
                                                  const void* q, int64_t query_tokens, const void* cache, int64_t pages,
                                                  const float* cache_scale, void* o, float* lse) {
  const MlaCacheFormat format = cache_scale ? MlaCacheFormat::fp8_576 : MlaCacheFormat::fp8_656;
  return set_fused(format, cache_scale, tensors, heads, page, q, query_tokens, cache, pages, o, lse);
}

hypermla_status hypermla_decode_create(const hypermla_decode_options* options, const char* device, void* workspace,
                                       hypermla_decode** decode) {
  return guarded_call([&] {
    required(decode, "decode");
    *decode = new hypermla_decode{MlaDecode(options_of(options), device_of(device), workspace), ""};
  });
}

hypermla_status hypermla_decode_workspace_bytes(const hypermla_decode_options* options, const char* device,
                                                size_t* bytes) {
  return guarded_call(
      [&] { required(bytes, "bytes") = MlaDecode::workspace_bytes(options_of(options), device_of(device)); });
}

hypermla_status hypermla_decode_fixed_split(const hypermla_decode_options* options, size_t bytes, const char* device,
                                            int32_t* split) {
  return guarded_call(
      [&] { required(split, "split") = MlaDecode::fixed_split(options_of(options), bytes, device_of(device)); });
}

void hypermla_decode_destroy(hypermla_decode* decode) { delete decode; }

hypermla_status hypermla_decode_plan(hypermla_decode* decode, const int32_t* lengths, const int32_t* query_starts,
                                     int32_t requests, void* stream) {
  return guarded_call([&] { required(decode, "decode").decode.plan(lengths, query_starts, requests, stream); });
}

hypermla_status hypermla_decode_plan_shared(hypermla_decode* decode, const int32_t* lengths,
                                            const int32_t* query_starts, int32_t requests, const int32_t* block_table,
                                            int64_t table_stride, void* stream) {
  return guarded_call([&] {
    required(decode, "decode").decode.plan(lengths, query_starts, requests, stream, block_table, table_stride);
  });
}

hypermla_status hypermla_decode_run(hypermla_decode* decode, const hypermla_decode_tensors* tensors, void* stream) {
  return guarded_call([&] {
    const hypermla_decode_tensors with = tensors_of(tensors);
    required(decode, "decode")
        .decode.run({.q_latent = {with.q_latent, with.q_latent_token_stride, with.q_latent_head_stride},
                     .q_rope = {with.q_rope, with.q_rope_token_stride, with.q_rope_head_stride},
                     .query_tokens = count_of("query_tokens", with.query_tokens),
                     .cache_latent = with.cache_latent,
                     .cache_rope = with.cache_rope,
                     .latent_page_stride = with.latent_page_stride,
                     .latent_token_stride = with.latent_token_stride,
                     .rope_page_stride = with.rope_page_stride,
                     .rope_token_stride = with.rope_token_stride,
                     .pages = with.pages,
                     .block_table = with.block_table,
                     .table_stride = with.table_stride,
                     .o = with.o,
                     .o_token_stride = with.o_token_stride,
                     .o_head_stride = with.o_head_stride,
                     .lse = with.lse,
                     .lse_token_stride = with.lse_token_stride,
                     .lse_head_stride = with.lse_head_stride,
                     .lse_request_stride = with.lse_request_stride,
                     .sinks = with.sinks,
                     .cache_scale = with.cache_scale,
                     .q_scale = with.q_scale},
                    stream);
  });
}

hypermla_status hypermla_decode_check(hypermla_decode* decode) {
  return guarded_call([&] { required(decode, "decode").decode.check(); });
}

hypermla_status hypermla_decode_explain(hypermla_decode* decode, const char** text) {
  return guarded_call([&] {
    hypermla_decode& of = required(decode, "decode");
    of.explanation = of.decode.explain();
    required(text, "text") = of.explanation.c_str();
  });
}
