// hypermla._hypermla.MlaCacheOps: include/hypermla/mla_cache.h for Python. Calls take numbers only, addresses and
// strides; python/hypermla/mla_cache.py takes those from tensors.
#include "hypermla/mla_cache.h"

#include <cstring>

#include "extension.h"

namespace {

using hypermla::MlaCacheOps;

struct CacheObject {
  PyObject_HEAD MlaCacheOps* ops;
};
MlaCacheOps& ops_of(PyObject* self) { return *reinterpret_cast<CacheObject*>(self)->ops; }

using Address = unsigned long long;  // "K"
using Stride = long long;            // "L"
void* pointer(Address address) { return reinterpret_cast<void*>(address); }

// A tensor's address and its strides, as arguments of a call: "KLL".
struct Given {
  Address data;
  Stride token_stride, head_stride;
  template <class T>
  hypermla::MlaRows<T> rows() const {
    return {static_cast<T*>(pointer(data)), token_stride, head_stride};
  }
};

// "KKLLLLLi"
struct GivenCache {
  Address latent, rope;
  Stride strides[4], pages;
  int page;
  hypermla::MlaCache cache() const {
    return {pointer(latent), pointer(rope), strides[0], strides[1], strides[2], strides[3], pages, page};
  }
};

// MlaCacheOps(dtype, device)
PyObject* cache_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  const char *dtype, *device;
  if (!PyArg_ParseTuple(arguments, "ss", &dtype, &device)) return nullptr;
  return guarded([&]() -> PyObject* {
    if (std::strcmp(dtype, "bfloat16") != 0 && std::strcmp(dtype, "float16") != 0)
      throw hypermla::Error(std::string("dtype='") + dtype + "' is not supported: choose bfloat16 or float16");
    auto ops = std::make_unique<MlaCacheOps>(
        std::strcmp(dtype, "float16") == 0 ? hypermla::DType::float16 : hypermla::DType::bfloat16,
        hypermla::DeviceHandle(device));
    PyObject* self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self) reinterpret_cast<CacheObject*>(self)->ops = ops.release();
    return self;
  });
}

void cache_delete(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<CacheObject*>(self)->ops;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// merge_states(o_a, lse_a, o_b, lse_b, o, lse, tokens, heads, width, lse_base2, empty_lse_positive, stream)
PyObject* cache_merge_states(PyObject* self, PyObject* arguments) {
  Given o_a, lse_a, o_b, lse_b, o, lse;
  MlaCacheOps::Merge with;
  int base2, positive;
  Address stream;
  if (!PyArg_ParseTuple(arguments, "KLLKLLKLLKLLKLLKLLiiippK", &o_a.data, &o_a.token_stride, &o_a.head_stride,
                        &lse_a.data, &lse_a.token_stride, &lse_a.head_stride, &o_b.data, &o_b.token_stride,
                        &o_b.head_stride, &lse_b.data, &lse_b.token_stride, &lse_b.head_stride, &o.data,
                        &o.token_stride, &o.head_stride, &lse.data, &lse.token_stride, &lse.head_stride, &with.tokens,
                        &with.heads, &with.width, &base2, &positive, &stream))
    return nullptr;
  with.a = {o_a.rows<const void>(), lse_a.rows<const float>()};
  with.b = {o_b.rows<const void>(), lse_b.rows<const float>()};
  with.o = o.rows<void>();
  with.lse = lse.rows<float>();
  with.lse_base2 = base2;
  with.empty_lse_positive = positive;
  return guarded([&]() -> PyObject* {
    ops_of(self).merge_states(with, pointer(stream));
    Py_RETURN_NONE;
  });
}

// append(cache, latent, latent_stride, rope, rope_stride, slots, tokens, stream)
PyObject* cache_append(PyObject* self, PyObject* arguments) {
  GivenCache in;
  Address latent, rope, slots, stream;
  Stride latent_stride, rope_stride;
  int tokens;
  if (!PyArg_ParseTuple(arguments, "KKLLLLLiKLKLKiK", &in.latent, &in.rope, &in.strides[0], &in.strides[1],
                        &in.strides[2], &in.strides[3], &in.pages, &in.page, &latent, &latent_stride, &rope,
                        &rope_stride, &slots, &tokens, &stream))
    return nullptr;
  return guarded([&]() -> PyObject* {
    ops_of(self).append({.latent = pointer(latent),
                         .rope = pointer(rope),
                         .latent_stride = latent_stride,
                         .rope_stride = rope_stride,
                         .slots = static_cast<const std::int64_t*>(pointer(slots)),
                         .tokens = tokens,
                         .cache = in.cache()},
                        pointer(stream));
    Py_RETURN_NONE;
  });
}

// decompress_prefix(cache, block_table, tokens, heads, w_uk and its three strides, w_uv and its three strides, k,
// k_rope, v, stream)
PyObject* cache_decompress_prefix(PyObject* self, PyObject* arguments) {
  GivenCache in;
  Address table, uk, uv, stream;
  Stride uk_strides[3], uv_strides[3];
  Given k, k_rope, v;
  int tokens, heads;
  if (!PyArg_ParseTuple(arguments, "KKLLLLLiKiiKLLLKLLLKLLKLLKLLK", &in.latent, &in.rope, &in.strides[0],
                        &in.strides[1], &in.strides[2], &in.strides[3], &in.pages, &in.page, &table, &tokens, &heads,
                        &uk, &uk_strides[0], &uk_strides[1], &uk_strides[2], &uv, &uv_strides[0], &uv_strides[1],
                        &uv_strides[2], &k.data, &k.token_stride, &k.head_stride, &k_rope.data, &k_rope.token_stride,
                        &k_rope.head_stride, &v.data, &v.token_stride, &v.head_stride, &stream))
    return nullptr;
  return guarded([&]() -> PyObject* {
    ops_of(self).decompress_prefix({.cache = in.cache(),
                                    .block_table = static_cast<const int*>(pointer(table)),
                                    .tokens = tokens,
                                    .heads = heads,
                                    .w_uk = {pointer(uk), uk_strides[0], uk_strides[1], uk_strides[2]},
                                    .w_uv = {pointer(uv), uv_strides[0], uv_strides[1], uv_strides[2]},
                                    .k = k.rows<void>(),
                                    .k_rope = k_rope.rows<void>(),
                                    .v = v.rows<void>()},
                                   pointer(stream));
    Py_RETURN_NONE;
  });
}

PyMethodDef cache_methods[] = {{"merge_states", cache_merge_states, METH_VARARGS, nullptr},
                               {"append", cache_append, METH_VARARGS, nullptr},
                               {"decompress_prefix", cache_decompress_prefix, METH_VARARGS, nullptr},
                               {}};
PyType_Slot cache_slots[] = {{Py_tp_new, reinterpret_cast<void*>(cache_new)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(cache_delete)},
                             {Py_tp_methods, cache_methods},
                             {}};
PyType_Spec cache_spec = {"hypermla._hypermla.MlaCacheOps", sizeof(CacheObject), 0, Py_TPFLAGS_DEFAULT, cache_slots};

}  // namespace

bool add_mla_cache(PyObject* module) {
  PyObject* type = PyType_FromSpec(&cache_spec);
  const bool added = type && PyModule_AddObjectRef(module, "MlaCacheOps", type) == 0;
  Py_XDECREF(type);
  return added;
}
