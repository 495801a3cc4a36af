// hypermla._hypermla.MlaDecode: include/hypermla/mla_decode.h for Python. Calls of a step take the tensors themselves
// and compare every type, shape and device, which costs less than to remember what was seen.
#include "hypermla/mla_decode.h"

#include <cstdlib>

#include "extension.h"
#include "hypermla/base/error.h"
#include "tensor_view.h"

namespace {

constexpr std::int64_t kLatent = 512, kRope = 64, kWidth = kLatent + kRope;

struct DecodeObject {
  PyObject_HEAD hypermla::MlaDecode* decode;
  int heads, page, max_queries;
  int requests;  // of the last plan
  ElementType type;
  DLDevice device;
};
DecodeObject* as_decode(PyObject* self) { return reinterpret_cast<DecodeObject*>(self); }

// MlaDecode(device, workspace address, dtype, kernel, (heads, max_requests, max_queries, max_query_tokens, max_tokens,
//           page, split), scale, (causal, lse_base2, empty_lse_positive))
PyObject* decode_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  const char *device, *dtype, *kernel;
  unsigned long long workspace;
  hypermla::MlaDecodeOptions at;
  int causal, base2, positive;
  if (!PyArg_ParseTuple(arguments, "sKss(iiiiiii)f(ppp)", &device, &workspace, &dtype, &kernel, &at.heads,
                        &at.max_requests, &at.max_queries, &at.max_query_tokens, &at.max_tokens, &at.page, &at.split,
                        &at.scale, &causal, &base2, &positive))
    return nullptr;
  return guarded([&]() -> PyObject* {
    at.dtype = half_precision(dtype);
    at.causal = causal;
    at.lse_base2 = base2;
    at.empty_lse_positive = positive;
    at.kernel = kernel;
    const hypermla::DeviceHandle handle(device);
    auto decode = std::make_unique<hypermla::MlaDecode>(at, handle, reinterpret_cast<void*>(workspace));
    PyObject* self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return nullptr;
    const char* ordinal = std::strchr(device, ':');
    DecodeObject& made = *as_decode(self);
    made.decode = decode.release();
    made.heads = at.heads;
    made.page = at.page;
    made.max_queries = at.max_queries;
    made.type = at.dtype == hypermla::DType::float16 ? ElementType::float16 : ElementType::bfloat16;
    made.device = {handle.is_gpu() ? kCuda : kCpu, ordinal ? std::atoi(ordinal + 1) : 0};
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
PyObject* decode_explain(PyObject* self, PyObject*) {
  return guarded([&] { return PyUnicode_FromString(as_decode(self)->decode->explain().c_str()); });
}
// "cpu" or "cuda:0"
PyObject* decode_device(PyObject* self, PyObject*) {
  const DLDevice& device = as_decode(self)->device;
  return device.type == kCpu ? PyUnicode_FromString("cpu") : PyUnicode_FromFormat("cuda:%d", int(device.id));
}
PyObject* decode_check(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    as_decode(self)->decode->check();
    Py_RETURN_NONE;
  });
}

bool has_arguments(Py_ssize_t given, Py_ssize_t wanted) {
  if (given != wanted) PyErr_Format(PyExc_TypeError, "%zd arguments are expected, not %zd", wanted, given);
  return given == wanted;
}

// plan(lengths, query_starts or None, stream or None)
PyObject* decode_plan(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
  if (!has_arguments(given, 3)) return nullptr;
  return guarded([&]() -> PyObject* {
    DecodeObject& of = *as_decode(self);
    const TensorView lengths = view_of(arguments[0]);
    require("lengths", lengths, ElementType::int32, {"requests"}, of.device);
    const auto require_dense = [](const char* name, const TensorView& view) {
      if (!view.is_dense()) hypermla::fail("{} must be dense; copy it first", name);
    };
    require_dense("lengths", lengths);
    const void* query_starts = nullptr;
    if (arguments[1] != Py_None) {
      const TensorView starts = view_of(arguments[1]);
      require("query_starts", starts, ElementType::int32, {lengths.shape[0] + 1}, of.device);
      require_dense("query_starts", starts);
      query_starts = starts.data;
    }
    of.decode->plan(static_cast<const int*>(lengths.data), static_cast<const int*>(query_starts), int(lengths.shape[0]),
                    stream_of(arguments[2], lengths));
    of.requests = int(lengths.shape[0]);
    Py_RETURN_NONE;
  });
}

// A tensor of `width` columns, or a pair of 512 and 64: the latent part and the rotary part.
struct LatentRope {
  LatentRope(const char* name, PyObject* given, WantedAxis first, std::int64_t second, const DecodeObject& of) {
    const bool pair = PyTuple_Check(given);
    if (pair && PyTuple_Size(given) != 2) hypermla::fail("{} must be a tensor or a pair of two", name);
    const auto read = [&](PyObject* tensor, const std::string& its, std::int64_t columns) {
      const TensorView view = view_of(tensor);
      require(its.c_str(), view, of.type, {first, second, columns}, of.device);
      if (view.strides[2] != 1) hypermla::fail("{} must be dense in its last dimension; copy it first", its);
      return view;
    };
    latent = pair ? read(PyTuple_GetItem(given, 0), std::string(name) + "[0]", kLatent) : read(given, name, kWidth);
    if (pair) first.size = latent.shape[0], first.name = nullptr;
    rope = pair ? read(PyTuple_GetItem(given, 1), std::string(name) + "[1]", kRope) : latent;
    if (!pair) rope.data = static_cast<char*>(rope.data) + 2 * kLatent;
  }
  TensorView latent, rope;
};

// run(q or pair, cache or pair, block_table, out, lse, stream or None)
PyObject* decode_run(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
  if (!has_arguments(given, 6)) return nullptr;
  return guarded([&]() -> PyObject* {
    const DecodeObject& of = *as_decode(self);
    const LatentRope q("q", arguments[0], "tokens", of.heads, of), cache("cache", arguments[1], "pages", of.page, of);
    const TensorView table = view_of(arguments[2]), out = view_of(arguments[3]), lse = view_of(arguments[4]);
    const std::int64_t tokens = q.latent.shape[0];
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
    if (table.strides[1] != 1 || out.strides[2] != 1)
      hypermla::fail("{} must be dense in its last dimension; copy it first",
                     out.strides[2] != 1 ? "out" : "block_table");
    if (table.shape[0] < of.requests)
      hypermla::fail("block_table has {} rows, but the plan has {} requests", table.shape[0], of.requests);
    if (tokens == 0) Py_RETURN_NONE;
    if (out.data == q.latent.data || out.data == cache.latent.data)
      hypermla::fail("out must have memory of its own: blocks read q and the cache after others have written");
    as_decode(self)->decode->run({.q_latent = {q.latent.data, q.latent.strides[0], q.latent.strides[1]},
                                  .q_rope = {q.rope.data, q.rope.strides[0], q.rope.strides[1]},
                                  .query_tokens = int(tokens),
                                  .cache_latent = cache.latent.data,
                                  .cache_rope = cache.rope.data,
                                  .latent_page_stride = cache.latent.strides[0],
                                  .latent_token_stride = cache.latent.strides[1],
                                  .rope_page_stride = cache.rope.strides[0],
                                  .rope_token_stride = cache.rope.strides[1],
                                  .pages = cache.latent.shape[0],
                                  .block_table = static_cast<const int*>(table.data),
                                  .table_stride = table.strides[0],
                                  .o = out.data,
                                  .o_token_stride = out.strides[0],
                                  .o_head_stride = out.strides[1],
                                  .lse = static_cast<float*>(lse.data),
                                  .lse_token_stride = lse.strides[by_request],
                                  .lse_head_stride = lse.strides[1 + by_request],
                                  .lse_request_stride = by_request ? lse.strides[0] : 0},
                                 stream_of(arguments[5], q.latent));
    Py_RETURN_NONE;
  });
}

template <class F>
PyCFunction fast(F* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}
PyMethodDef methods[] = {{"workspace_bytes", decode_workspace_bytes, METH_NOARGS, nullptr},
                         {"explain", decode_explain, METH_NOARGS, nullptr},
                         {"device", decode_device, METH_NOARGS, nullptr},
                         {"check", decode_check, METH_NOARGS, nullptr},
                         {"plan", fast(decode_plan), METH_FASTCALL, nullptr},
                         {"run", fast(decode_run), METH_FASTCALL, nullptr},
                         {}};
PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(decode_new)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(decode_delete)},
                       {Py_tp_methods, methods},
                       {}};
PyType_Spec spec = {"hypermla._hypermla.MlaDecode", sizeof(DecodeObject), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

bool add_mla_decode(PyObject* module) {
  PyObject* type = PyType_FromSpec(&spec);
  const bool added = type && PyModule_AddObjectRef(module, "MlaDecode", type) == 0;
  Py_XDECREF(type);
  return added;
}
