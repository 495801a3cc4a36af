// hypermla._hypermla.MlaDecode: include/hypermla/mla_decode.h for Python. Calls of a step take the tensors themselves
// and compare every type, shape and device, which costs less than to remember what was seen.
#include "hypermla/mla_decode.h"

#include <algorithm>

#include "extension.h"
#include "hypermla/base/error.h"
#include "tensor_view.h"

namespace {

using hypermla::MlaDecode;

constexpr std::int64_t kLatent = 512, kRope = 64;

struct DecodeObject {
  PyObject_HEAD MlaDecode* decode;
  int heads, page, max_queries, max_tokens;
  int longest;  // list, of sparse attention, or 0
  int fp8;      // bytes of a token, or 0
  ElementType of_queries;
  int shards, shard, interleave;
  int requests, columns;  // of the last plan; of its block table, on a CPU alone, which sees the lengths
  ElementType type;
  DLDevice device;
};
DecodeObject* as_decode(PyObject* self) { return reinterpret_cast<DecodeObject*>(self); }

// MlaDecode(device, workspace or None, dtype, kernel, (heads, max_requests, max_queries, max_query_tokens, max_tokens,
//           page, split), scale, (causal, lse_base2, empty_lse_positive, sparse, shared_prefixes, fp8_queries), bytes
//           of a token in FP8 or 0, (shards, shard, interleave))
PyObject* decode_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  const char *device, *dtype, *kernel;
  PyObject* workspace;
  hypermla::MlaDecodeOptions at;
  double scale;
  int causal, base2, positive, sparse, shared_prefixes, fp8_queries, fp8;
  if (!PyArg_ParseTuple(arguments, "sOss(iiiiiii)d(pppppp)i(iii)", &device, &workspace, &dtype, &kernel, &at.heads,
                        &at.max_requests, &at.max_queries, &at.max_query_tokens, &at.max_tokens, &at.page, &at.split,
                        &scale, &causal, &base2, &positive, &sparse, &shared_prefixes, &fp8_queries, &fp8, &at.shards,
                        &at.shard, &at.interleave))
    return nullptr;
  return guarded([&]() -> PyObject* {
    at.dtype = half_precision(dtype);
    at.scale = scale_of(scale);
    at.causal = causal;
    at.sparse = sparse;
    at.fp8_queries = fp8_queries;
    if (fp8)
      at.cache_format =
          fp8 == hypermla::kFp8TokenBytes ? hypermla::MlaCacheFormat::fp8_656 : hypermla::MlaCacheFormat::fp8_576;
    at.lse_base2 = base2;
    at.empty_lse_positive = positive;
    at.shared_prefixes = shared_prefixes;
    at.kernel = kernel;
    std::unique_ptr<hypermla::DeviceHandle> handle;
    std::unique_ptr<MlaDecode> decode;
    without_lock([&] { handle = std::make_unique<hypermla::DeviceHandle>(device); });
    void* const memory = workspace == Py_None ? nullptr
                                              : workspace_of(workspace, MlaDecode::workspace_bytes(at, *handle),
                                                             device_of(*handle, device));
    without_lock([&] { decode = std::make_unique<MlaDecode>(at, *handle, memory); });  // it may compile
    PyObject* self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return nullptr;
    DecodeObject& made = *as_decode(self);
    made.decode = decode.release();
    made.heads = at.heads;
    made.page = at.page;
    made.fp8 = fp8;
    made.max_queries = at.max_queries;
    made.max_tokens = at.max_tokens;
    made.longest = at.sparse ? at.max_tokens : 0;
    made.shards = at.shards;
    made.shard = at.shard;
    made.interleave = at.interleave;
    made.type = type_of(at.dtype);
    made.of_queries = at.fp8_queries ? ElementType::uint8 : made.type;
    made.device = device_of(*handle, device);
    return self;
  });
}

void decode_delete(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete as_decode(self)->decode;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* decode_workspace_bytes(PyObject* self, PyObject*) {
  return PyLong_FromSize_t(as_decode(self)->decode->workspace_bytes());
}
// fixed_split(device, heads, max_requests, max_queries, max_tokens, bytes)
PyObject* decode_fixed_split(PyObject*, PyObject* arguments) {
  const char* device;
  hypermla::MlaDecodeOptions at;
  unsigned long long bytes;
  if (!PyArg_ParseTuple(arguments, "siiiiK", &device, &at.heads, &at.max_requests, &at.max_queries, &at.max_tokens,
                        &bytes))
    return nullptr;
  return guarded([&] { return PyLong_FromLong(MlaDecode::fixed_split(at, bytes, hypermla::DeviceHandle(device))); });
}
PyObject* decode_most_query_tokens(PyObject*, PyObject* heads) {
  const long count = PyLong_AsLong(heads);
  if (count == -1 && PyErr_Occurred()) return nullptr;
  return guarded([&] {
    if (count < 1 || count > MlaDecode::kMaxHeads)
      hypermla::fail("heads={} is not supported: it must be from 1 to {}", count, MlaDecode::kMaxHeads);
    return PyLong_FromLong(MlaDecode::most_query_tokens(int(count)));
  });
}
PyObject* decode_explain(PyObject* self, PyObject*) {
  return guarded([&] { return PyUnicode_FromString(as_decode(self)->decode->explain().c_str()); });
}
PyObject* decode_device(PyObject* self, PyObject*) { return name_of(as_decode(self)->device); }
PyObject* decode_check(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    without_lock([&] { as_decode(self)->decode->check(); });  // it waits for the device
    Py_RETURN_NONE;
  });
}

// Columns of a block table that a request of so many tokens has.
int columns_of(const DecodeObject& of, int tokens) {
  if (of.longest) return tokens;
  const int turn = of.shards * of.interleave;
  const int here =
      tokens / turn * of.interleave + std::clamp(tokens % turn - of.shard * of.interleave, 0, of.interleave);
  return (here + of.page - 1) / of.page;
}

// plan(lengths or None, query_starts or None, stream or None, block_table or None). Without lengths, which sparse
// attention may lack, the table says how many requests there are.
PyObject* decode_plan(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
  if (!gets_arguments(given, 4)) return nullptr;
  return guarded([&]() -> PyObject* {
    DecodeObject& of = *as_decode(self);
    const bool whole = arguments[0] == Py_None && arguments[3] != Py_None;
    const TensorView lengths = view_of(whole ? "block_table" : "lengths", arguments[whole ? 3 : 0]);
    if (whole) {
      require("block_table", lengths, ElementType::int32, {"requests", "pages"}, of.device);
    } else {
      require("lengths", lengths, ElementType::int32, {"requests"}, of.device);
      require_dense_columns("lengths", lengths);
    }
    const int* query_starts = nullptr;
    if (arguments[1] != Py_None) {
      const TensorView starts = view_of("query_starts", arguments[1]);
      require("query_starts", starts, ElementType::int32, {lengths.shape[0] + 1}, of.device);
      require_dense_columns("query_starts", starts);
      query_starts = static_cast<const int*>(starts.data);
    }
    const void* block_table = nullptr;
    std::int64_t table_stride = 0;
    if (arguments[3] != Py_None) {
      const TensorView table = view_of("block_table", arguments[3]);
      require("block_table", table, ElementType::int32, {"requests", "pages"}, of.device);
      require_dense_columns("block_table", table);
      if (table.shape[0] < lengths.shape[0])
        hypermla::fail("block_table has {} rows, but lengths has {}", table.shape[0], lengths.shape[0]);
      if (whole && table.shape[1] < of.longest)
        hypermla::fail("block_table has {} columns, but without lengths every list has max_tokens={}", table.shape[1],
                       of.longest);
      if (!whole) {
        block_table = table.data;
        table_stride = table.strides[0];
      }
    }
    const int requests = extent("requests", lengths.shape[0]);
    const int* const tokens = whole ? nullptr : static_cast<const int*>(lengths.data);
    of.decode->plan(tokens, query_starts, requests, stream_of(arguments[2], lengths),
                    static_cast<const int*>(block_table), table_stride);
    of.requests = requests;
    of.columns = 0;
    for (int r = 0; r < requests && of.device.type == kCpu; ++r)
      if (!query_starts || query_starts[r + 1] > query_starts[r])
        of.columns =
            std::max(of.columns, tokens ? columns_of(of, std::clamp(tokens[r], 0, of.max_tokens)) : of.longest);
    Py_RETURN_NONE;
  });
}

// run(q or pair, cache or pair, block_table, out, lse, stream or None, sinks or None, cache_scale or None, q_scale or
// None)
PyObject* decode_run(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
  if (!gets_arguments(given, 9)) return nullptr;
  return guarded([&]() -> PyObject* {
    const DecodeObject& of = *as_decode(self);
    const ColumnParts q("q", arguments[0], of.of_queries, "tokens", of.heads, kLatent, kRope, of.device);
    const ColumnParts cache("cache", arguments[1], of.fp8 ? ElementType::uint8 : of.type, "pages", of.page,
                            of.fp8 ? of.fp8 : kLatent, of.fp8 ? 0 : kRope, of.device);
    const TensorView table = view_of("block_table", arguments[2]), out = view_of("out", arguments[3]),
                     lse = view_of("lse", arguments[4]);
    const std::int64_t tokens = q.first.shape[0];
    require("block_table", table, ElementType::int32, {"requests", "pages"}, of.device);
    require("out", out, of.type, {tokens, of.heads, kLatent}, of.device);
    const bool by_request = lse.ndim == 3;
    if (by_request) {
      require("lse", lse, ElementType::float32, {"requests", of.max_queries, of.heads}, of.device);
      if (lse.shape[0] < of.requests)
        hypermla::fail("lse has {} rows, but the plan has {} requests", lse.shape[0], of.requests);
    } else {
      require("lse", lse, ElementType::float32, {tokens, of.heads}, of.device);
    }
    require_dense_columns("block_table", table);
    require_dense_columns("out", out);
    require_output("out", out);
    require_output("lse", lse, by_request);
    if (table.shape[0] < of.requests)
      hypermla::fail("block_table has {} rows, but the plan has {} requests", table.shape[0], of.requests);
    if (table.shape[1] < of.columns)
      hypermla::fail("block_table has {} columns, but a request of the plan has {}", table.shape[1], of.columns);
    const auto inputs = {
        std::pair("q", &q.first), {"q", &q.second}, {"the cache", &cache.first}, {"the cache", &cache.second}};
    require_apart("out", out, inputs);
    if (!by_request) require_apart("lse", lse, inputs);
    if (tokens == 0 || table.shape[0] == 0) Py_RETURN_NONE;  // no request, and none in a replay either
    // In pages of one token the one stride is both.
    const auto token_stride = [&](const TensorView& part) { return part.strides[of.page > 1]; };
    as_decode(self)->decode->run({.q_latent = {q.first.data, q.first.strides[0], q.first.strides[1]},
                                  .q_rope = {q.second.data, q.second.strides[0], q.second.strides[1]},
                                  .query_tokens = extent("query_tokens", tokens),
                                  .cache_latent = cache.first.data,
                                  .cache_rope = cache.second.data,
                                  .latent_page_stride = cache.first.strides[0],
                                  .latent_token_stride = token_stride(cache.first),
                                  .rope_page_stride = cache.second.strides[0],
                                  .rope_token_stride = token_stride(cache.second),
                                  .pages = cache.first.shape[0],
                                  .block_table = static_cast<const int*>(table.data),
                                  .table_stride = table.strides[0],
                                  .o = out.data,
                                  .o_token_stride = out.strides[0],
                                  .o_head_stride = out.strides[1],
                                  .lse = static_cast<float*>(lse.data),
                                  .lse_token_stride = lse.strides[by_request],
                                  .lse_head_stride = lse.strides[1 + by_request],
                                  .lse_request_stride = by_request ? lse.strides[0] : 0,
                                  .sinks = floats_of("sinks", arguments[6], of.heads, of.device),
                                  .cache_scale = floats_of("cache_scale", arguments[7], 1, of.device),
                                  .q_scale = floats_of("q_scale", arguments[8], 1, of.device)},
                                 stream_of(arguments[5], q.first));
    Py_RETURN_NONE;
  });
}

PyMethodDef methods[] = {{"workspace_bytes", decode_workspace_bytes, METH_NOARGS, nullptr},
                         {"fixed_split", decode_fixed_split, METH_VARARGS | METH_STATIC, nullptr},
                         {"most_query_tokens", decode_most_query_tokens, METH_O | METH_STATIC, nullptr},
                         {"explain", decode_explain, METH_NOARGS, nullptr},
                         {"device", decode_device, METH_NOARGS, nullptr},
                         {"check", decode_check, METH_NOARGS, nullptr},
                         {"plan", fast_function(decode_plan), METH_FASTCALL, nullptr},
                         {"run", fast_function(decode_run), METH_FASTCALL, nullptr},
                         {}};
PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(decode_new)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(decode_delete)},
                       {Py_tp_methods, methods},
                       {}};
PyType_Spec spec = {"hypermla._hypermla.MlaDecode", sizeof(DecodeObject), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

bool add_mla_decode(PyObject* module) {
  PyObject* type = PyType_FromSpec(&spec);
  PyObject* limits = Py_BuildValue("(iiiiii)", MlaDecode::kMaxHeads, MlaDecode::kMaxRequests, MlaDecode::kMaxQueries,
                                   MlaDecode::kMaxTokens, MlaDecode::kMaxShards, MlaDecode::kMaxInterleave);
  const bool added = type && PyModule_AddObjectRef(module, "MlaDecode", type) == 0 &&
                     PyModule_AddObjectRef(module, "DECODE_LIMITS", limits) == 0;
  Py_XDECREF(limits);
  Py_XDECREF(type);
  return added;
}
