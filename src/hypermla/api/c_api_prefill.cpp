#include "hypermla/api/c_api_calls.h"
#include "hypermla/mla_prefill.h"

struct hypermla_prefill {
  hypermla::MlaPrefill prefill;
  std::string explanation;
};

namespace hypermla {
namespace {

hypermla_prefill_options default_prefill_options() {
  const MlaPrefillOptions at;
  return {sizeof(hypermla_prefill_options),
          at.heads,
          at.max_requests,
          at.max_query_tokens,
          at.max_tokens,
          std::int32_t(at.dtype),
          at.causal,
          at.scale,
          at.lse_base2,
          at.empty_lse_positive,
          at.accumulate,
          at.batch_invariant,
          at.query_rows};
}

hypermla_prefill_tensors tensors_of(const hypermla_prefill_tensors* given) {
  return of_caller(given, {}, "tensors", "hypermla_prefill_tensors_init");
}

MlaPrefillOptions options_of(const hypermla_prefill_options* given) {
  static_assert(offsetof(hypermla_prefill_options, query_rows) + sizeof(std::int32_t) ==
                sizeof(hypermla_prefill_options));
  const hypermla_prefill_options at =
      of_caller(given, default_prefill_options(), "options", "hypermla_prefill_options_init");
  return {.heads = at.heads,
          .max_requests = at.max_requests,
          .max_query_tokens = at.max_query_tokens,
          .max_tokens = at.max_tokens,
          .dtype = dtype_of(at.dtype),
          .causal = flag_of("causal", at.causal),
          .scale = at.scale,
          .lse_base2 = flag_of("lse_base2", at.lse_base2),
          .empty_lse_positive = flag_of("empty_lse_positive", at.empty_lse_positive),
          .accumulate = flag_of("accumulate", at.accumulate),
          .query_rows = flag_of("query_rows", at.query_rows),
          .batch_invariant = flag_of("batch_invariant", at.batch_invariant)};
}

}  // namespace
}  // namespace hypermla

using namespace hypermla;

void hypermla_prefill_options_init(hypermla_prefill_options* options, size_t size) {
  initialise(options, default_prefill_options(), size);
}

void hypermla_prefill_tensors_init(hypermla_prefill_tensors* tensors, size_t size) { initialise(tensors, {}, size); }

hypermla_status hypermla_prefill_tensors_dense(hypermla_prefill_tensors* tensors, int32_t heads, const void* q,
                                               int64_t query_tokens, const void* k, const void* v, int64_t tokens,
                                               void* o, float* lse) {
  return guarded_call([&] {
    hypermla_prefill_tensors to = tensors_of(tensors);
    const MlaPrefillTensors from = MlaPrefillTensors::dense(heads, q, count_of("query_tokens", query_tokens), k, v,
                                                            count_of("tokens", tokens), o, lse);
    to.q_nope = from.q_nope.data;
    to.q_nope_token_stride = from.q_nope.token_stride;
    to.q_nope_head_stride = from.q_nope.head_stride;
    to.q_rope = from.q_rope.data;
    to.q_rope_token_stride = from.q_rope.token_stride;
    to.q_rope_head_stride = from.q_rope.head_stride;
    to.query_tokens = from.query_tokens;
    to.k_nope = from.k_nope.data;
    to.k_nope_token_stride = from.k_nope.token_stride;
    to.k_nope_head_stride = from.k_nope.head_stride;
    to.k_rope = from.k_rope.data;
    to.k_rope_token_stride = from.k_rope.token_stride;
    to.k_rope_head_stride = from.k_rope.head_stride;
    to.v = from.v.data;
    to.v_token_stride = from.v.token_stride;
    to.v_head_stride = from.v.head_stride;
    to.tokens = from.tokens;
    to.o = from.o;
    to.o_token_stride = from.o_token_stride;
    to.o_head_stride = from.o_head_stride;
    to.lse = from.lse;
    to.lse_token_stride = from.lse_token_stride;
    to.lse_head_stride = from.lse_head_stride;
    std::memcpy(tensors, &to, std::min(tensors->size, sizeof to));
  });
}

hypermla_status hypermla_prefill_create(const hypermla_prefill_options* options, const char* device, void* workspace,
                                        hypermla_prefill** prefill) {
  return guarded_call([&] {
    required(prefill, "prefill");
    *prefill = new hypermla_prefill{MlaPrefill(options_of(options), device_of(device), workspace), ""};
  });
}

hypermla_status hypermla_prefill_workspace_bytes(const hypermla_prefill_options* options, const char* device,
                                                 size_t* bytes) {
  return guarded_call(
      [&] { required(bytes, "bytes") = MlaPrefill::workspace_bytes(options_of(options), device_of(device)); });
}

void hypermla_prefill_destroy(hypermla_prefill* prefill) { delete prefill; }

hypermla_status hypermla_prefill_plan(hypermla_prefill* prefill, const int32_t* query_starts,
                                      const int32_t* token_starts, int32_t requests, void* stream) {
  return guarded_call([&] { required(prefill, "prefill").prefill.plan(query_starts, token_starts, requests, stream); });
}

hypermla_status hypermla_prefill_plan_rows(hypermla_prefill* prefill, const int32_t* query_starts,
                                           const int32_t* token_starts, const int32_t* query_rows, int32_t requests,
                                           void* stream) {
  return guarded_call(
      [&] { required(prefill, "prefill").prefill.plan(query_starts, token_starts, requests, query_rows, stream); });
}

hypermla_status hypermla_prefill_run(hypermla_prefill* prefill, const hypermla_prefill_tensors* tensors, void* stream) {
  return guarded_call([&] {
    const hypermla_prefill_tensors with = tensors_of(tensors);
    required(prefill, "prefill")
        .prefill.run({.q_nope = {with.q_nope, with.q_nope_token_stride, with.q_nope_head_stride},
                      .q_rope = {with.q_rope, with.q_rope_token_stride, with.q_rope_head_stride},
                      .query_tokens = count_of("query_tokens", with.query_tokens),
                      .k_nope = {with.k_nope, with.k_nope_token_stride, with.k_nope_head_stride},
                      .k_rope = {with.k_rope, with.k_rope_token_stride, with.k_rope_head_stride},
                      .v = {with.v, with.v_token_stride, with.v_head_stride},
                      .tokens = count_of("tokens", with.tokens),
                      .o = with.o,
                      .o_token_stride = with.o_token_stride,
                      .o_head_stride = with.o_head_stride,
                      .lse = with.lse,
                      .lse_token_stride = with.lse_token_stride,
                      .lse_head_stride = with.lse_head_stride},
                     stream);
  });
}

hypermla_status hypermla_prefill_check(hypermla_prefill* prefill) {
  return guarded_call([&] { required(prefill, "prefill").prefill.check(); });
}

hypermla_status hypermla_prefill_explain(hypermla_prefill* prefill, const char** text) {
  return guarded_call([&] {
    hypermla_prefill& of = required(prefill, "prefill");
    of.explanation = of.prefill.explain();
    required(text, "text") = of.explanation.c_str();
  });
}
