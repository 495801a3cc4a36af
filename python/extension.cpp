// hypermla._hypermla: include/hypermla/hypermla.h for Python. python/hypermla/__init__.py makes it convenient and
// checks what is bound. Only the stable ABI of Python 3.11 is used.
#include "extension.h"

#include <algorithm>

#include "dlpack.h"
#include "hypermla/base/error.h"
#include "hypermla/base/pattern.h"
#include "hypermla/base/process.h"
#include "hypermla/hypermla.h"
#include "hypermla/version.h"

namespace {

struct KernelObject {
  PyObject_HEAD hypermla::Kernel* kernel;
  bool is_gpu;
  bool busy;  // inside a call that has released the interpreter lock
};
KernelObject* as_kernel(PyObject* self) { return reinterpret_cast<KernelObject*>(self); }

// guarded() without the interpreter lock, for what may take long. One kernel serves one thread at a time.
template <class Body>
PyObject* guarded_unlocked(KernelObject* self, Body&& body) {
  if (self->busy) {
    PyErr_SetString(g_error, "this Kernel is in use by another thread; give each thread a Kernel of its own");
    return nullptr;
  }
  self->busy = true;
  PyObject* done = guarded([&]() -> PyObject* {
    without_lock([&] { body(*self->kernel); });
    Py_RETURN_NONE;
  });
  self->busy = false;
  return done;
}

const char* dtype_name(hypermla::DType dtype) {
  switch (dtype) {
    case hypermla::DType::bfloat16:
      return "bfloat16";
    case hypermla::DType::float16:
      return "float16";
    case hypermla::DType::float32:
      return "float32";
    case hypermla::DType::int32:
      return "int32";
  }
  return "";
}

PyObject* shape_tuple(const std::int64_t* values, Py_ssize_t count) {
  PyObject* tuple = PyTuple_New(count);
  for (Py_ssize_t i = 0; tuple && i < count; ++i) {
    PyObject* value = PyLong_FromLongLong(values[i]);
    if (!value || PyTuple_SetItem(tuple, i, value) != 0) {  // which takes the reference, also when it fails
      Py_DECREF(tuple);
      return nullptr;
    }
  }
  return tuple;
}

// Kernel(name, version, device, language, problem: dict[str, str])
PyObject* kernel_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  const char *name, *version, *device, *language;
  PyObject* problem;
  if (!PyArg_ParseTuple(arguments, "ssssO!", &name, &version, &device, &language, &PyDict_Type, &problem))
    return nullptr;
  std::map<std::string, std::string> fields;
  if (!read_fields(problem, fields)) return nullptr;
  return guarded([&]() -> PyObject* {
    const hypermla::DeviceHandle handle(device);
    auto kernel = std::make_unique<hypermla::Kernel>(name, fields, handle, version, language);
    auto* allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    PyObject* self = allocate(type, 0);
    if (!self) return nullptr;
    as_kernel(self)->kernel = kernel.release();
    as_kernel(self)->is_gpu = handle.is_gpu();
    return self;
  });
}

void kernel_delete(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete as_kernel(self)->kernel;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// [(name, shape, dtype, role)]
PyObject* kernel_tensors(PyObject* self, PyObject*) {
  PyObject* list = PyList_New(0);
  if (!list) return nullptr;
  for (const hypermla::TensorInfo& info : as_kernel(self)->kernel->tensors()) {
    const char* role = info.is_input ? "input" : info.is_workspace ? "workspace" : "output";
    PyObject* shape = shape_tuple(info.shape.data(), Py_ssize_t(info.shape.size()));
    PyObject* row = shape ? Py_BuildValue("(sNss)", info.name.c_str(), shape, dtype_name(info.dtype), role) : nullptr;
    const bool added = row && PyList_Append(list, row) == 0;
    Py_XDECREF(row);
    if (!added) {
      Py_DECREF(list);
      return nullptr;
    }
  }
  return list;
}

PyObject* kernel_is_gpu(PyObject* self, PyObject*) { return PyBool_FromLong(as_kernel(self)->is_gpu); }

PyObject* kernel_bind(PyObject* self, PyObject* arguments) {
  const char* name;
  PyObject* address;
  if (!PyArg_ParseTuple(arguments, "sO", &name, &address)) return nullptr;
  void* data = PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) return nullptr;
  return guarded_unlocked(as_kernel(self), [&](hypermla::Kernel& kernel) { kernel.bind(name, data); });
}

PyObject* kernel_prepare(PyObject* self, PyObject*) {
  return guarded_unlocked(as_kernel(self), [](hypermla::Kernel& kernel) { kernel.prepare(); });
}

PyObject* kernel_run(PyObject* self, PyObject* address) {
  void* stream = PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) return nullptr;
  return guarded_unlocked(as_kernel(self), [&](hypermla::Kernel& kernel) { kernel.run(stream); });
}

PyObject* kernel_check(PyObject* self, PyObject*) {
  return guarded_unlocked(as_kernel(self), [](hypermla::Kernel& kernel) { kernel.check(); });
}

// tune(max_iterations, retune) -> [what was left out, and why]
PyObject* kernel_tune(PyObject* self, PyObject* arguments) {
  int max_iterations, retune;
  if (!PyArg_ParseTuple(arguments, "ip", &max_iterations, &retune)) return nullptr;
  std::vector<std::string> remarks;
  PyObject* done = guarded_unlocked(as_kernel(self), [&](hypermla::Kernel& kernel) {
    remarks = kernel.tune({.max_iterations = max_iterations, .retune = retune != 0, .stop = interrupted});
  });
  if (!done) return nullptr;
  Py_DECREF(done);
  return list_of(remarks, [](const std::string& remark) { return PyUnicode_FromString(remark.c_str()); });
}

// profile(mode, out_dir, label, bench_runs) -> (directory, missing, cold, burst, sustained, (bottleneck, confidence,
// why), [opportunity], [(stage, burst, [metric])])
PyObject* kernel_profile(PyObject* self, PyObject* arguments) {
  const char *mode, *out_dir, *label;
  int bench_runs;
  if (!PyArg_ParseTuple(arguments, "sssi", &mode, &out_dir, &label, &bench_runs)) return nullptr;
  hypermla::ProfileSummary summary;
  PyObject* done = guarded_unlocked(as_kernel(self), [&](hypermla::Kernel& kernel) {
    summary = kernel.profile(mode, {.out_dir = out_dir, .label = label, .bench_runs = bench_runs});
  });
  if (!done) return nullptr;
  Py_DECREF(done);
  return profile_tuple(summary);
}

PyObject* kernel_predicted_seconds(PyObject* self, PyObject* arguments) {
  const char* device;
  if (!PyArg_ParseTuple(arguments, "s", &device)) return nullptr;
  return guarded([&] { return PyFloat_FromDouble(as_kernel(self)->kernel->predicted_seconds(device)); });
}

PyObject* list_kernels(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    const std::vector<std::string> names = hypermla::Kernel::list();
    PyObject* list = PyList_New(Py_ssize_t(names.size()));
    for (std::size_t i = 0; list && i < names.size(); ++i) {
      PyObject* name = PyUnicode_FromString(names[i].c_str());
      if (!name || PyList_SetItem(list, Py_ssize_t(i), name) != 0) {
        Py_DECREF(list);
        return nullptr;
      }
    }
    return list;
  });
}

// choose(problem: dict[str, str], device, language) -> [(path, kernel, n, burst_us, sustained_us, limit, draft)]
PyObject* choose_kernels(PyObject*, PyObject* arguments) {
  PyObject* problem;
  const char *device, *language;
  if (!PyArg_ParseTuple(arguments, "O!ss", &PyDict_Type, &problem, &device, &language)) return nullptr;
  std::map<std::string, std::string> fields;
  if (!read_fields(problem, fields)) return nullptr;
  return guarded([&]() -> PyObject* {
    return list_of(hypermla::choose(fields, device, language), [](const hypermla::Choice& one) {
      return Py_BuildValue("(ssiddsN)", one.path.c_str(), one.kernel.c_str(), one.n, one.burst_seconds * 1e6,
                           one.sustained_seconds * 1e6, one.limit.c_str(), PyBool_FromLong(one.draft));
    });
  });
}

// What a DLPack capsule describes: (address, device type, device id, type code, bits, lanes, shape, strides or None,
// read-only). The capsule keeps its tensor; its maker must outlive the use of the address.
PyObject* read_dlpack(PyObject*, PyObject* capsule) {
  const DLTensor* tensor = nullptr;
  bool read_only = false;
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    auto* managed = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    if (managed->major != 1) {
      PyErr_SetString(g_error, "this tensor speaks another major version of DLPack than 1; bind its address instead");
      return nullptr;
    }
    tensor = &managed->tensor;
    read_only = managed->flags & kReadOnly;
  } else {
    tensor = static_cast<DLTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));  // the first member of DLManagedTensor
  }
  if (!tensor) return nullptr;
  PyObject* shape = shape_tuple(tensor->shape, tensor->ndim);
  PyObject* strides = tensor->strides ? shape_tuple(tensor->strides, tensor->ndim) : Py_NewRef(Py_None);
  PyObject* address = PyLong_FromVoidPtr(static_cast<char*>(tensor->data) + tensor->byte_offset);
  if (!shape || !strides || !address) {
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    Py_XDECREF(address);
    return nullptr;
  }
  return Py_BuildValue("(NiiiiiNNN)", address, int(tensor->device.type), int(tensor->device.id), int(tensor->code),
                       int(tensor->bits), int(tensor->lanes), shape, strides, PyBool_FromLong(read_only));
}

// Where the bytes of a memoryview are. The memoryview keeps them there.
PyObject* buffer_address(PyObject*, PyObject* view) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(view, &buffer, PyBUF_FULL_RO) != 0) return nullptr;
  PyObject* address = PyLong_FromVoidPtr(buffer.buf);
  PyBuffer_Release(&buffer);
  return address;
}

PyMethodDef kernel_methods[] = {{"tensors", kernel_tensors, METH_NOARGS, nullptr},
                                {"is_gpu", kernel_is_gpu, METH_NOARGS, nullptr},
                                {"bind", kernel_bind, METH_VARARGS, nullptr},
                                {"tune", kernel_tune, METH_VARARGS, nullptr},
                                {"prepare", kernel_prepare, METH_NOARGS, nullptr},
                                {"run", kernel_run, METH_O, nullptr},
                                {"check", kernel_check, METH_NOARGS, nullptr},
                                {"profile", kernel_profile, METH_VARARGS, nullptr},
                                {"predicted_seconds", kernel_predicted_seconds, METH_VARARGS, nullptr},
                                {}};
PyType_Slot kernel_slots[] = {{Py_tp_new, reinterpret_cast<void*>(kernel_new)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(kernel_delete)},
                              {Py_tp_methods, kernel_methods},
                              {}};
PyType_Spec kernel_spec = {"hypermla._hypermla.Kernel", sizeof(KernelObject), 0, Py_TPFLAGS_DEFAULT, kernel_slots};

PyMethodDef module_methods[] = {{"list", list_kernels, METH_NOARGS, nullptr},
                                {"choose", choose_kernels, METH_VARARGS, nullptr},
                                {"read_dlpack", read_dlpack, METH_O, nullptr},
                                {"buffer_address", buffer_address, METH_O, nullptr},
                                {}};
PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_hypermla", nullptr, -1, module_methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

hypermla::DType half_precision(const std::string& name) {
  if (name != "bfloat16" && name != "float16")
    throw hypermla::Error("dtype='" + name + "' is not supported: choose bfloat16 or float16");
  return name == "float16" ? hypermla::DType::float16 : hypermla::DType::bfloat16;
}

float scale_of(double scale) {
  if (scale != 0 && float(scale) == 0)
    hypermla::fail("scale={} is not supported: it is 0 in 32 bits; give a larger one, or 0 for the default", scale);
  return float(scale);
}

std::string python_words(const std::string& sentence) {
  static const hypermla::Pattern flag("--([A-Za-z]\\w*)(=([\\w.+:-]*\\w))?"),
      plain("-?[0-9.]+(e[+-]?[0-9]+)?|true|false");
  std::string said;
  bool command = false;
  std::size_t begin = 0;
  while (begin <= sentence.size()) {
    const std::size_t end = std::min(sentence.find('`', begin), sentence.size());
    const std::string part = sentence.substr(begin, end - begin);
    std::string words;
    std::size_t last = 0;
    for (const auto& at : command ? std::vector<hypermla::Pattern::Found>() : flag.search_all(part)) {
      const std::string& value = at.groups[3];
      words.append(part, last, at.begin - last);
      words += at.groups[1];
      if (value == "true" || value == "false")
        words += value == "true" ? "=True" : "=False";
      else if (!value.empty())
        words += plain.match(value) ? "=" + value : "=\"" + value + "\"";
      last = at.end();
    }
    words.append(part, last);
    said += words;
    if (end < sentence.size()) said += '`';
    command = !command;
    begin = end + 1;
  }
  return said;
}

bool read_fields(PyObject* problem, std::map<std::string, std::string>& fields) {
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(problem, &at, &key, &value);) {
    const char* field = PyUnicode_AsUTF8AndSize(key, nullptr);
    const char* text = field ? PyUnicode_AsUTF8AndSize(value, nullptr) : nullptr;
    if (!text) return false;
    fields[field] = text;
  }
  return true;
}

// (median_us, low_us, high_us, tflops, gbps, roofline_fraction) or None
static PyObject* times_tuple(const std::optional<hypermla::Times>& times) {
  if (!times) Py_RETURN_NONE;
  return Py_BuildValue("(dddddd)", times->median_us, times->low_us, times->high_us, times->tflops, times->gbps,
                       times->roofline_fraction);
}

PyObject* profile_tuple(const hypermla::ProfileSummary& summary) {
  const hypermla::Bottleneck found = summary.bottleneck.value_or(hypermla::Bottleneck{});
  PyObject* opportunities = list_of(summary.opportunities, [](const hypermla::Opportunity& one) {
    return Py_BuildValue("(ssdsssss)", one.id.c_str(), one.name.c_str(), one.gain_percent, one.trigger.c_str(),
                         one.why.c_str(), one.card.c_str(), one.refuted.c_str(), one.stage.c_str());
  });
  PyObject* stages = list_of(summary.stages, [](const hypermla::ProfileSummary::Stage& stage) {
    PyObject* metrics = list_of(stage.metrics, [](const hypermla::Metric& metric) {
      return Py_BuildValue("(sssd)", metric.name.c_str(), metric.label.c_str(), metric.unit.c_str(), metric.value);
    });
    return Py_BuildValue("(sNN)", stage.name.c_str(), times_tuple(stage.burst), metrics);
  });
  return Py_BuildValue("(ssNNN(sss)NN)", summary.directory.c_str(), summary.missing.c_str(), times_tuple(summary.cold),
                       times_tuple(summary.burst), times_tuple(summary.sustained), found.kind.c_str(),
                       found.confidence.c_str(), found.why.c_str(), opportunities, stages);
}

bool interrupted() {
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool raised = PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  return raised;
}

PyMODINIT_FUNC PyInit__hypermla() {
  PyObject* module = PyModule_Create(&module_definition);
  if (!module) return nullptr;
  g_error = PyErr_NewException("hypermla.Error", PyExc_RuntimeError, nullptr);
  PyObject* kernel = PyType_FromSpec(&kernel_spec);
  if (!g_error || !kernel || PyModule_AddObjectRef(module, "Error", g_error) != 0 ||
      PyModule_AddStringConstant(module, "VERSION", HYPERMLA_VERSION) != 0 ||
      PyModule_AddObjectRef(module, "Kernel", kernel) != 0 || !add_mla_decode(module) || !add_mla_prefill(module) ||
      !add_mla_cache(module) || !add_runs(module)) {
    Py_XDECREF(kernel);
    Py_DECREF(module);
    return nullptr;
  }
  Py_DECREF(kernel);
  // Compilers may still run for a tune() that Ctrl-C ended. Python then ends by the signal, without destructors.
  Py_AtExit(hypermla::end_programs);
  return module;
}
