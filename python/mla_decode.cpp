// hypermla._hypermla.MlaDecode: include/hypermla/mla_decode.h for Python. Calls of a step take integers only, addresses
// and strides, so that they cost little; python/hypermla/__init__.py takes those from tensors.
#include "hypermla/mla_decode.h"

#include <array>
#include <cstring>

#include "extension.h"

namespace {

struct DecodeObject {
  PyObject_HEAD hypermla::MlaDecode* decode;
  int heads;
};
DecodeObject* as_decode(PyObject* self) { return reinterpret_cast<DecodeObject*>(self); }

// MlaDecode(device, workspace address, dtype, kernel, (heads, max_requests, max_queries, max_query_tokens, max_tokens,
// page,
//           split), scale, (causal, lse_base2, empty_lse_positive))
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
    if (std::strcmp(dtype, "bfloat16") != 0 && std::strcmp(dtype, "float16") != 0)
      throw hypermla::Error(std::string("dtype='") + dtype + "' is not supported: choose bfloat16 or float16");
    at.dtype = std::strcmp(dtype, "float16") == 0 ? hypermla::DType::float16 : hypermla::DType::bfloat16;
    at.causal = causal;
    at.lse_base2 = base2;
    at.empty_lse_positive = positive;
    at.kernel = kernel;
    auto decode =
        std::make_unique<hypermla::MlaDecode>(at, hypermla::DeviceHandle(device), reinterpret_cast<void*>(workspace));
    PyObject* self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return nullptr;
    as_decode(self)->decode = decode.release();
    as_decode(self)->heads = at.heads;
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
PyObject* decode_check(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    as_decode(self)->decode->check();
    Py_RETURN_NONE;
  });
}

// `count` integers of a call; false with a Python exception.
template <std::size_t count>
bool read_integers(PyObject* const* arguments, Py_ssize_t given, std::array<std::int64_t, count>& values) {
  if (given != Py_ssize_t(count)) {
    PyErr_Format(PyExc_TypeError, "%zu integers are expected, not %zd", count, given);
    return false;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned long long value = PyLong_AsUnsignedLongLongMask(arguments[i]);
    if (value == ~0ull && PyErr_Occurred()) return false;
    values[i] = std::int64_t(value);
  }
  return true;
}

// plan(lengths, query_starts, requests, stream)
PyObject* decode_plan(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
  std::array<std::int64_t, 4> of;
  if (!read_integers(arguments, given, of)) return nullptr;
  return guarded([&]() -> PyObject* {
    as_decode(self)->decode->plan(reinterpret_cast<const int*>(of[0]), reinterpret_cast<const int*>(of[1]), int(of[2]),
                                  reinterpret_cast<void*>(of[3]));
    Py_RETURN_NONE;
  });
}

// run(the members of MlaDecodeTensors in their order, stream)
PyObject* decode_run(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
  std::array<std::int64_t, 24> of;
  if (!read_integers(arguments, given, of)) return nullptr;
  auto pointer = [&](int i) { return reinterpret_cast<void*>(of[i]); };
  const hypermla::MlaDecodeTensors tensors = {.q_latent = {pointer(0), of[1], of[2]},
                                              .q_rope = {pointer(3), of[4], of[5]},
                                              .query_tokens = int(of[6]),
                                              .cache_latent = pointer(7),
                                              .cache_rope = pointer(8),
                                              .latent_page_stride = of[9],
                                              .latent_token_stride = of[10],
                                              .rope_page_stride = of[11],
                                              .rope_token_stride = of[12],
                                              .pages = of[13],
                                              .block_table = static_cast<const int*>(pointer(14)),
                                              .table_stride = of[15],
                                              .o = pointer(16),
                                              .o_token_stride = of[17],
                                              .o_head_stride = of[18],
                                              .lse = static_cast<float*>(pointer(19)),
                                              .lse_token_stride = of[20],
                                              .lse_head_stride = of[21],
                                              .lse_request_stride = of[22]};
  return guarded([&]() -> PyObject* {
    as_decode(self)->decode->run(tensors, pointer(23));
    Py_RETURN_NONE;
  });
}

template <class F>
PyCFunction fast(F* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}
PyMethodDef methods[] = {{"workspace_bytes", decode_workspace_bytes, METH_NOARGS, nullptr},
                         {"explain", decode_explain, METH_NOARGS, nullptr},
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
