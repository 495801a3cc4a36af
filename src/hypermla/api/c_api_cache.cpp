#include "hypermla/api/c_api_calls.h"
#include "hypermla/mla_cache.h"

struct hypermla_cache_ops {
  hypermla::MlaCacheOps ops;
};

namespace hypermla {
namespace {

hypermla_append_arguments default_append() {
  hypermla_append_arguments at = {};
  at.page = MlaCache().page;
  return at;
}
hypermla_merge_arguments default_merge() {
  hypermla_merge_arguments at = {};
  at.width = MlaCacheOps::Merge().width;
  return at;
}
hypermla_decompress_arguments default_decompress() {
  hypermla_decompress_arguments at = {};
  at.page = MlaCache().page;
  return at;
}
hypermla_split_arguments default_split() {
  hypermla_split_arguments at = {};
  at.page = MlaCacheOps::Split().page;
  return at;
}

hypermla_append_arguments arguments_of(const hypermla_append_arguments* given) {
  return of_caller(given, default_append(), "arguments", "hypermla_append_arguments_init");
}
hypermla_merge_arguments arguments_of(const hypermla_merge_arguments* given) {
  return of_caller(given, default_merge(), "arguments", "hypermla_merge_arguments_init");
}
hypermla_decompress_arguments arguments_of(const hypermla_decompress_arguments* given) {
  return of_caller(given, default_decompress(), "arguments", "hypermla_decompress_arguments_init");
}
hypermla_split_arguments arguments_of(const hypermla_split_arguments* given) {
  return of_caller(given, default_split(), "arguments", "hypermla_split_arguments_init");
}

static_assert(int(MlaCacheFormat::as_queries) == HYPERMLA_CACHE_AS_QUERIES &&
              int(MlaCacheFormat::fp8_656) == HYPERMLA_CACHE_FP8_656 &&
              int(MlaCacheFormat::fp8_576) == HYPERMLA_CACHE_FP8_576);

MlaCacheFormat format_of(const hypermla_append_arguments& with) { return cache_format_of(with.cache_format); }
MlaCacheFormat format_of(const hypermla_decompress_arguments&) { return MlaCacheFormat::as_queries; }

// The members of a cache have the same names wherever there is one.
template <class Arguments>
MlaCache cache_of(const Arguments& with) {
  return {.latent = const_cast<void*>(with.cache_latent),
          .rope = const_cast<void*>(with.cache_rope),
          .latent_page_stride = with.latent_page_stride,
          .latent_token_stride = with.latent_token_stride,
          .rope_page_stride = with.rope_page_stride,
          .rope_token_stride = with.rope_token_stride,
          .pages = with.pages,
          .page = count_of("page", with.page),
          .format = format_of(with)};
}
template <class Arguments>
hypermla_status set_fused_cache(Arguments* arguments, const void* cache, std::int64_t pages, std::int64_t page) {
  return guarded_call([&] {
    Arguments to = arguments_of(arguments);
    const MlaCache from = MlaCache::fused(const_cast<void*>(cache), pages, count_of("page", page), format_of(to));
    to.cache_latent = from.latent;
    to.cache_rope = from.rope;
    to.latent_page_stride = from.latent_page_stride;
    to.latent_token_stride = from.latent_token_stride;
    to.rope_page_stride = from.rope_page_stride;
    to.rope_token_stride = from.rope_token_stride;
    to.pages = from.pages;
    to.page = from.page;
    std::memcpy(arguments, &to, std::min(arguments->size, sizeof to));
  });
}

}  // namespace
}  // namespace hypermla

using namespace hypermla;

void hypermla_append_arguments_init(hypermla_append_arguments* arguments, size_t size) {
  initialise(arguments, default_append(), size);
}
void hypermla_merge_arguments_init(hypermla_merge_arguments* arguments, size_t size) {
  initialise(arguments, default_merge(), size);
}
void hypermla_decompress_arguments_init(hypermla_decompress_arguments* arguments, size_t size) {
  initialise(arguments, default_decompress(), size);
}
void hypermla_split_arguments_init(hypermla_split_arguments* arguments, size_t size) {
  initialise(arguments, default_split(), size);
}

hypermla_status hypermla_append_arguments_fused(hypermla_append_arguments* arguments, void* cache, int64_t pages,
                                                int64_t page) {
  return set_fused_cache(arguments, cache, pages, page);
}
hypermla_status hypermla_decompress_arguments_fused(hypermla_decompress_arguments* arguments, const void* cache,
                                                    int64_t pages, int64_t page) {
  return set_fused_cache(arguments, cache, pages, page);
}

hypermla_status hypermla_cache_ops_create(int32_t dtype, const char* device, hypermla_cache_ops** ops) {
  return guarded_call([&] {
    required(ops, "ops");
    *ops = new hypermla_cache_ops{MlaCacheOps(dtype_of(dtype), device_of(device))};
  });
}
void hypermla_cache_ops_destroy(hypermla_cache_ops* ops) { delete ops; }

hypermla_status hypermla_append(hypermla_cache_ops* ops, const hypermla_append_arguments* arguments, void* stream) {
  return guarded_call([&] {
    const hypermla_append_arguments with = arguments_of(arguments);
    required(ops, "ops")
        .ops.append({.latent = with.latent,
                     .rope = with.rope,
                     .latent_stride = with.latent_stride,
                     .rope_stride = with.rope_stride,
                     .slots = with.slots,
                     .tokens = count_of("tokens", with.tokens),
                     .cache = cache_of(with),
                     .cache_scale = with.cache_scale},
                    stream);
  });
}

hypermla_status hypermla_merge_states(hypermla_cache_ops* ops, const hypermla_merge_arguments* arguments,
                                      void* stream) {
  return guarded_call([&] {
    const hypermla_merge_arguments with = arguments_of(arguments);
    required(ops, "ops")
        .ops.merge_states({.a = {{with.a_o, with.a_o_token_stride, with.a_o_head_stride},
                                 {with.a_lse, with.a_lse_token_stride, with.a_lse_head_stride}},
                           .b = {{with.b_o, with.b_o_token_stride, with.b_o_head_stride},
                                 {with.b_lse, with.b_lse_token_stride, with.b_lse_head_stride}},
                           .o = {with.o, with.o_token_stride, with.o_head_stride},
                           .lse = {with.lse, with.lse_token_stride, with.lse_head_stride},
                           .tokens = count_of("tokens", with.tokens),
                           .heads = count_of("heads", with.heads),
                           .width = count_of("width", with.width),
                           .lse_base2 = flag_of("lse_base2", with.lse_base2),
                           .empty_lse_positive = flag_of("empty_lse_positive", with.empty_lse_positive)},
                          stream);
  });
}

hypermla_status hypermla_decompress_prefix(hypermla_cache_ops* ops, const hypermla_decompress_arguments* arguments,
                                           void* stream) {
  return guarded_call([&] {
    const hypermla_decompress_arguments with = arguments_of(arguments);
    required(ops, "ops")
        .ops.decompress_prefix(
            {.cache = cache_of(with),
             .block_table = with.block_table,
             .tokens = count_of("tokens", with.tokens),
             .heads = count_of("heads", with.heads),
             .w_uk = {with.w_uk, with.w_uk_head_stride, with.w_uk_row_stride, with.w_uk_column_stride},
             .w_uv = {with.w_uv, with.w_uv_head_stride, with.w_uv_row_stride, with.w_uv_column_stride},
             .k = {with.k, with.k_token_stride, with.k_head_stride},
             .k_rope = {with.k_rope, with.k_rope_token_stride, with.k_rope_head_stride},
             .v = {with.v, with.v_token_stride, with.v_head_stride}},
            stream);
  });
}

hypermla_status hypermla_split_prefixes(hypermla_cache_ops* ops, const hypermla_split_arguments* arguments,
                                        void* stream) {
  return guarded_call([&] {
    using Prefix = MlaCacheOps::Prefix;
    static_assert(sizeof(hypermla_prefix) == sizeof(Prefix) &&
                  offsetof(hypermla_prefix, first_token) == offsetof(Prefix, first_token) &&
                  offsetof(hypermla_prefix, least_queries) == offsetof(Prefix, least_queries) &&
                  offsetof(hypermla_prefix, valid) == offsetof(Prefix, valid));
    const hypermla_split_arguments with = arguments_of(arguments);
    required(ops, "ops")
        .ops.split_prefixes({.block_table = with.block_table,
                             .table_stride = with.table_stride,
                             .width = count_of("width", with.width),
                             .lengths = with.lengths,
                             .query_starts = with.query_starts,
                             .requests = count_of("requests", with.requests),
                             .slots = with.slots,
                             .tokens = count_of("tokens", with.tokens),
                             .page = count_of("page", with.page),
                             .prefixes = reinterpret_cast<Prefix*>(with.prefixes),
                             .prefix_pages = with.prefix_pages,
                             .prefix_pages_stride = with.prefix_pages_stride,
                             .count = count_of("count", with.count),
                             .owners = with.owners,
                             .cache_pages = with.cache_pages,
                             .found = with.found,
                             .own_table = with.own_table,
                             .own_table_stride = with.own_table_stride,
                             .own_lengths = with.own_lengths,
                             .shared_query_starts = with.shared_query_starts,
                             .shared_token_starts = with.shared_token_starts,
                             .query_rows = with.query_rows},
                            stream);
  });
}
