// hypermla._hypermla.MlaPrefill: include/hypermla/mla_prefill.h for Python. Calls take integers only, addresses and
// strides; python/hypermla/mla_prefill.py takes those from tensors.
#include "hypermla/mla_prefill.h"

#include "extension.h"

namespace {

struct PrefillObject {
  PyObject_HEAD hypermla::MlaPrefill* prefill;
  bool is_gpu;
};
hypermla::MlaPrefill& prefill_of(PyObject* self) { return *reinterpret_cast<PrefillObject*>(self)->prefill; }

// MlaPrefill(device, workspace address, dtype, (heads, max_requests, max_query_tokens, max_tokens), scale, (causal,
// lse_base2, empty_lse_positive))
PyObject* prefill_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  const char *device, *dtype;
  unsigned long long workspace;
  hypermla::MlaPrefillOptions at;
  int causal, base2, positive;
  if (!PyArg_ParseTuple(arguments, "sKs(iiii)f(ppp)", &device, &workspace, &dtype, &at.heads, &at.max_requests,
                        &at.max_query_tokens, &at.max_tokens, &at.scale, &causal, &base2, &positive))
    return nullptr;
  return guarded([&]() -> PyObject* {
    at.dtype = half_precision(dtype);
    at.causal = causal;
    at.lse_base2 = base2;
    at.empty_lse_positive = positive;
    const hypermla::DeviceHandle handle(device);
    auto prefill = std::make_unique<hypermla::MlaPrefill>(at, handle, reinterpret_cast<void*>(workspace));
    PyObject* self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return nullptr;
    reinterpret_cast<PrefillObject*>(self)->prefill = prefill.release();
    reinterpret_cast<PrefillObject*>(self)->is_gpu = handle.is_gpu();
    return self;
  });
}

void prefill_delete(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<PrefillObject*>(self)->prefill;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* prefill_workspace_bytes(PyObject* self, PyObject*) {
  return PyLong_FromSize_t(prefill_of(self).workspace_bytes());
}
PyObject* prefill_is_gpu(PyObject* self, PyObject*) {
  return PyBool_FromLong(reinterpret_cast<PrefillObject*>(self)->is_gpu);
}
PyObject* prefill_explain(PyObject* self, PyObject*) {
  return guarded([&] { return PyUnicode_FromString(prefill_of(self).explain().c_str()); });
}
PyObject* prefill_check(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    prefill_of(self).check();
    Py_RETURN_NONE;
  });
}

// plan(query_starts, token_starts, requests, stream)
PyObject* prefill_plan(PyObject* self, PyObject* arguments) {
  unsigned long long query_starts, token_starts, stream;
  int requests;
  if (!PyArg_ParseTuple(arguments, "KKiK", &query_starts, &token_starts, &requests, &stream)) return nullptr;
  return guarded([&]() -> PyObject* {
    prefill_of(self).plan(reinterpret_cast<const int*>(query_starts), reinterpret_cast<const int*>(token_starts),
                          requests, reinterpret_cast<void*>(stream));
    Py_RETURN_NONE;
  });
}

// run((address, token stride, head stride) of q_nope, q_rope, k_nope, k_rope, v, o and lse, query_tokens, tokens,
// stream)
PyObject* prefill_run(PyObject* self, PyObject* arguments) {
  struct Tensor {
    unsigned long long address;
    long long token_stride, head_stride;
    operator hypermla::MlaPrefillTensors::Rows() const {
      return {reinterpret_cast<const void*>(address), token_stride, head_stride};
    }
  } all[7];
  int query_tokens, tokens;
  unsigned long long stream;
  auto& [q_nope, q_rope, k_nope, k_rope, v, o, lse] = all;
#define HYPERMLA_TENSOR(tensor) &tensor.address, &tensor.token_stride, &tensor.head_stride
  if (!PyArg_ParseTuple(arguments, "(KLL)(KLL)(KLL)(KLL)(KLL)(KLL)(KLL)iiK", HYPERMLA_TENSOR(q_nope),
                        HYPERMLA_TENSOR(q_rope), HYPERMLA_TENSOR(k_nope), HYPERMLA_TENSOR(k_rope), HYPERMLA_TENSOR(v),
                        HYPERMLA_TENSOR(o), HYPERMLA_TENSOR(lse), &query_tokens, &tokens, &stream))
    return nullptr;
#undef HYPERMLA_TENSOR
  return guarded([&]() -> PyObject* {
    const hypermla::MlaPrefillTensors tensors = {.q_nope = q_nope,
                                                 .q_rope = q_rope,
                                                 .query_tokens = query_tokens,
                                                 .k_nope = k_nope,
                                                 .k_rope = k_rope,
                                                 .v = v,
                                                 .tokens = tokens,
                                                 .o = reinterpret_cast<void*>(o.address),
                                                 .o_token_stride = o.token_stride,
                                                 .o_head_stride = o.head_stride,
                                                 .lse = reinterpret_cast<float*>(lse.address),
                                                 .lse_token_stride = lse.token_stride,
                                                 .lse_head_stride = lse.head_stride};
    prefill_of(self).run(tensors, reinterpret_cast<void*>(stream));
    Py_RETURN_NONE;
  });
}

PyMethodDef prefill_methods[] = {{"workspace_bytes", prefill_workspace_bytes, METH_NOARGS, nullptr},
                                 {"is_gpu", prefill_is_gpu, METH_NOARGS, nullptr},
                                 {"explain", prefill_explain, METH_NOARGS, nullptr},
                                 {"check", prefill_check, METH_NOARGS, nullptr},
                                 {"plan", prefill_plan, METH_VARARGS, nullptr},
                                 {"run", prefill_run, METH_VARARGS, nullptr},
                                 {}};
PyType_Slot prefill_slots[] = {{Py_tp_new, reinterpret_cast<void*>(prefill_new)},
                               {Py_tp_dealloc, reinterpret_cast<void*>(prefill_delete)},
                               {Py_tp_methods, prefill_methods},
                               {}};
PyType_Spec prefill_spec = {"hypermla._hypermla.MlaPrefill", sizeof(PrefillObject), 0, Py_TPFLAGS_DEFAULT,
                            prefill_slots};

}  // namespace

bool add_mla_prefill(PyObject* module) {
  PyObject* type = PyType_FromSpec(&prefill_spec);
  const bool added = type && PyModule_AddObjectRef(module, "MlaPrefill", type) == 0;
  Py_XDECREF(type);
  return added;
}
