// hypermla._hypermla.MlaPrefill: include/hypermla/mla_prefill.h for Python. Calls of a step take the tensors themselves
// and compare every type, shape and device, as MlaDecode's do.
#include "hypermla/mla_prefill.h"

#include "extension.h"
#include "hypermla/base/error.h"
#include "tensor_view.h"

namespace {

constexpr std::int64_t kNope = 128, kPrefillRope = 64, kValue = 128;

struct PrefillObject {
  PyObject_HEAD hypermla::MlaPrefill* prefill;
  int heads;
  ElementType type;
  DLDevice device;
};
PrefillObject& as_prefill(PyObject* self) { return *reinterpret_cast<PrefillObject*>(self); }
hypermla::MlaPrefill& prefill_of(PyObject* self) { return *as_prefill(self).prefill; }

// MlaPrefill(device, workspace or None, dtype, (heads, max_requests, max_query_tokens, max_tokens), scale, (causal,
// lse_base2, empty_lse_positive, accumulate, batch_invariant, query_rows))
PyObject* prefill_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  const char *device, *dtype;
  PyObject* workspace;
  hypermla::MlaPrefillOptions at;
  double scale;
  int causal, base2, positive, accumulate, invariant, rows;
  if (!PyArg_ParseTuple(arguments, "sOs(iiii)d(pppppp)", &device, &workspace, &dtype, &at.heads, &at.max_requests,
                        &at.max_query_tokens, &at.max_tokens, &scale, &causal, &base2, &positive, &accumulate,
                        &invariant, &rows))
    return nullptr;
  return guarded([&]() -> PyObject* {
    at.dtype = half_precision(dtype);
    at.scale = scale_of(scale);
    at.causal = causal;
    at.lse_base2 = base2;
    at.empty_lse_positive = positive;
    at.accumulate = accumulate;
    at.batch_invariant = invariant;
    at.query_rows = rows;
    std::unique_ptr<hypermla::DeviceHandle> handle;
    std::unique_ptr<hypermla::MlaPrefill> prefill;
    without_lock([&] { handle = std::make_unique<hypermla::DeviceHandle>(device); });
    using hypermla::MlaPrefill;
    void* const memory = workspace == Py_None ? nullptr
                                              : workspace_of(workspace, MlaPrefill::workspace_bytes(at, *handle),
                                                             device_of(*handle, device));
    without_lock([&] { prefill = std::make_unique<MlaPrefill>(at, *handle, memory); });  // it may compile
    PyObject* self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return nullptr;
    PrefillObject& made = as_prefill(self);
    made.prefill = prefill.release();
    made.heads = at.heads;
    made.type = type_of(at.dtype);
    made.device = device_of(*handle, device);
    return self;
  });
}

void prefill_delete(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete as_prefill(self).prefill;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* prefill_workspace_bytes(PyObject* self, PyObject*) {
  return PyLong_FromSize_t(prefill_of(self).workspace_bytes());
}
PyObject* prefill_device(PyObject* self, PyObject*) { return name_of(as_prefill(self).device); }
PyObject* prefill_explain(PyObject* self, PyObject*) {
  return guarded([&] { return PyUnicode_FromString(prefill_of(self).explain().c_str()); });
}
PyObject* prefill_check(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    without_lock([&] { prefill_of(self).check(); });  // it waits for the device
    Py_RETURN_NONE;
  });
}

// plan(query_starts, token_starts, stream or None, query_rows or None)
PyObject* prefill_plan(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
  if (!gets_arguments(given, 4)) return nullptr;
  return guarded([&]() -> PyObject* {
    const PrefillObject& of = as_prefill(self);
    const TensorView queries = view_of("query_starts", arguments[0]), tokens = view_of("token_starts", arguments[1]);
    require("query_starts", queries, ElementType::int32, {"requests + 1"}, of.device);
    require("token_starts", tokens, ElementType::int32, {queries.shape[0]}, of.device);
    require_dense_columns("query_starts", queries);
    require_dense_columns("token_starts", tokens);
    if (queries.shape[0] == 0) hypermla::fail("query_starts is empty; without requests it holds a 0");
    const int* query_rows = nullptr;
    if (arguments[3] != Py_None) {
      const TensorView rows = view_of("query_rows", arguments[3]);
      require("query_rows", rows, ElementType::int32, {"queries"}, of.device);
      require_dense_columns("query_rows", rows);
      query_rows = static_cast<const int*>(rows.data);
    }
    prefill_of(self).plan(static_cast<const int*>(queries.data), static_cast<const int*>(tokens.data),
                          extent("requests", queries.shape[0] - 1), query_rows, stream_of(arguments[2], queries));
    Py_RETURN_NONE;
  });
}

// run(q or pair, k or pair, v, out, lse, stream or None)
PyObject* prefill_run(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
  if (!gets_arguments(given, 6)) return nullptr;
  return guarded([&]() -> PyObject* {
    const PrefillObject& of = as_prefill(self);
    const ColumnParts q("q", arguments[0], of.type, "query_tokens", of.heads, kNope, kPrefillRope, of.device),
        k("k", arguments[1], of.type, "tokens", of.heads, kNope, kPrefillRope, of.device);
    const TensorView v = view_of("v", arguments[2]), out = view_of("out", arguments[3]),
                     lse = view_of("lse", arguments[4]);
    const std::int64_t queries = q.first.shape[0], tokens = k.first.shape[0];
    require("v", v, of.type, {tokens, of.heads, kValue}, of.device);
    require("out", out, of.type, {queries, of.heads, kValue}, of.device);
    require("lse", lse, ElementType::float32, {queries, of.heads}, of.device);
    require_dense_columns("v", v);
    require_dense_columns("out", out);
    require_output("out", out);
    require_output("lse", lse);
    const auto inputs = {std::pair("q", &q.first), {"q", &q.second}, {"k", &k.first}, {"k", &k.second}, {"v", &v}};
    require_apart("out", out, inputs);
    require_apart("lse", lse, inputs);
    if (queries == 0) Py_RETURN_NONE;
    const auto rows = [](const TensorView& view) {
      return hypermla::MlaPrefillTensors::Rows{view.data, view.strides[0], view.strides[1]};
    };
    prefill_of(self).run({.q_nope = rows(q.first),
                          .q_rope = rows(q.second),
                          .query_tokens = extent("query_tokens", queries),
                          .k_nope = rows(k.first),
                          .k_rope = rows(k.second),
                          .v = rows(v),
                          .tokens = extent("tokens", tokens),
                          .o = out.data,
                          .o_token_stride = out.strides[0],
                          .o_head_stride = out.strides[1],
                          .lse = static_cast<float*>(lse.data),
                          .lse_token_stride = lse.strides[0],
                          .lse_head_stride = lse.strides[1]},
                         stream_of(arguments[5], q.first));
    Py_RETURN_NONE;
  });
}

PyMethodDef prefill_methods[] = {{"workspace_bytes", prefill_workspace_bytes, METH_NOARGS, nullptr},
                                 {"device", prefill_device, METH_NOARGS, nullptr},
                                 {"explain", prefill_explain, METH_NOARGS, nullptr},
                                 {"check", prefill_check, METH_NOARGS, nullptr},
                                 {"plan", fast_function(prefill_plan), METH_FASTCALL, nullptr},
                                 {"run", fast_function(prefill_run), METH_FASTCALL, nullptr},
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
  PyObject* limits = Py_BuildValue("(iiii)", hypermla::MlaPrefill::kMaxHeads, hypermla::MlaPrefill::kMaxRequests,
                                   hypermla::MlaPrefill::kMaxQueryTokens, hypermla::MlaPrefill::kMaxTokens);
  const bool added = type && PyModule_AddObjectRef(module, "MlaPrefill", type) == 0 &&
                     PyModule_AddObjectRef(module, "PREFILL_LIMITS", limits) == 0;
  Py_XDECREF(limits);
  Py_XDECREF(type);
  return added;
}
