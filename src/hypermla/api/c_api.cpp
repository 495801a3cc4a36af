#include "hypermla/c_api.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "hypermla/base/error.h"
#include "hypermla/mla_decode.h"
#include "hypermla/version.h"

struct hypermla_decode {
  hypermla::MlaDecode decode;
  std::string explanation;
};

namespace hypermla {
namespace {

static_assert(int(DType::bfloat16) == HYPERMLA_BFLOAT16 && int(DType::float16) == HYPERMLA_FLOAT16);

thread_local std::string t_last_error;

// Where memory is short there may be none for the sentence.
hypermla_status failed(hypermla_status status, const char* what) noexcept {
  try {
    t_last_error = what;
  } catch (...) {
    t_last_error.clear();
  }
  return status;
}

template <class Body>
hypermla_status guarded_call(Body&& body) noexcept {
  try {
    body();
    return HYPERMLA_OK;
  } catch (const Error& error) {
    return failed(HYPERMLA_ERROR, error.what());
  } catch (const std::bad_alloc&) {
    return failed(HYPERMLA_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return failed(HYPERMLA_INTERNAL, error.what());
  } catch (...) {
    return failed(HYPERMLA_INTERNAL, "an unknown exception");
  }
}

template <class T>
T& required(T* pointer, const char* name) {
  if (!pointer) fail("{} is NULL; give its address", name);
  return *pointer;
}

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
          nullptr};
}

// Sets a struct of the caller's header: members that this library does not know are 0.
template <class T>
void initialise(T* to, T from, std::size_t size) {
  if (!to || size < sizeof(std::size_t)) return;
  from.size = size;
  std::memset(to, 0, size);
  std::memcpy(to, &from, std::min(size, sizeof from));
}

// A struct of the caller's header as one of this library's: members that an older header lacks have their defaults.
template <class T>
T of_caller(const T* given, T known, const char* name) {
  const std::size_t size = required(given, name).size;
  if (size < sizeof(std::size_t) || size > 4096)
    fail("{}->size is {}; initialise the struct with hypermla_decode_{}_init()", name, size, name);
  const char* bytes = reinterpret_cast<const char*>(given);
  for (std::size_t i = sizeof known; i < size; ++i)
    if (bytes[i])
      fail(
          "{} has a member that HyperMLA {} does not know, as its size of {} bytes says; install the library of the "
          "header",
          name, HYPERMLA_VERSION, size);
  std::memcpy(&known, given, std::min(size, sizeof known));
  return known;
}

MlaDecodeOptions options_of(const hypermla_decode_options* given) {
  const hypermla_decode_options at = of_caller(given, default_options(), "options");
  if (at.dtype != HYPERMLA_BFLOAT16 && at.dtype != HYPERMLA_FLOAT16)
    fail("dtype={} is not supported: choose HYPERMLA_BFLOAT16 or HYPERMLA_FLOAT16", at.dtype);
  return {.heads = at.heads,
          .max_requests = at.max_requests,
          .max_queries = at.max_queries,
          .max_query_tokens = at.max_query_tokens,
          .max_tokens = at.max_tokens,
          .page = at.page,
          .dtype = DType(at.dtype),
          .causal = at.causal != 0,
          .scale = at.scale,
          .split = at.split,
          .lse_base2 = at.lse_base2 != 0,
          .empty_lse_positive = at.empty_lse_positive != 0,
          .kernel = at.kernel ? at.kernel : ""};
}

int query_tokens_of(std::int64_t tokens) {
  if (tokens < 0 || tokens > std::numeric_limits<int>::max())
    fail("query_tokens={} is not supported: it must be from 0 to 2^31 - 1", tokens);
  return int(tokens);
}

DeviceHandle device_of(const char* name) { return DeviceHandle(name ? name : "auto"); }

}  // namespace
}  // namespace hypermla

using namespace hypermla;

const char* hypermla_version(void) { return HYPERMLA_VERSION; }

const char* hypermla_last_error(void) { return t_last_error.c_str(); }

void hypermla_decode_options_init(hypermla_decode_options* options, size_t size) {
  initialise(options, default_options(), size);
}

void hypermla_decode_tensors_init(hypermla_decode_tensors* tensors, size_t size) { initialise(tensors, {}, size); }

hypermla_status hypermla_decode_tensors_fused(hypermla_decode_tensors* tensors, int32_t heads, int32_t page,
                                              const void* q, int64_t query_tokens, const void* cache, int64_t pages,
                                              void* o, float* lse) {
  return guarded_call([&] {
    hypermla_decode_tensors to = of_caller(tensors, {}, "tensors");
    const MlaDecodeTensors from =
        MlaDecodeTensors::fused(heads, page, q, query_tokens_of(query_tokens), cache, pages, nullptr, 0, o, lse);
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
    std::memcpy(tensors, &to, std::min(tensors->size, sizeof to));
  });
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

void hypermla_decode_destroy(hypermla_decode* decode) { delete decode; }

hypermla_status hypermla_decode_plan(hypermla_decode* decode, const int32_t* lengths, const int32_t* query_starts,
                                     int32_t requests, void* stream) {
  return guarded_call([&] { required(decode, "decode").decode.plan(lengths, query_starts, requests, stream); });
}

hypermla_status hypermla_decode_run(hypermla_decode* decode, const hypermla_decode_tensors* tensors, void* stream) {
  return guarded_call([&] {
    const hypermla_decode_tensors with = of_caller(tensors, {}, "tensors");
    required(decode, "decode")
        .decode.run({.q_latent = {with.q_latent, with.q_latent_token_stride, with.q_latent_head_stride},
                     .q_rope = {with.q_rope, with.q_rope_token_stride, with.q_rope_head_stride},
                     .query_tokens = query_tokens_of(with.query_tokens),
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
                     .lse_request_stride = with.lse_request_stride},
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
