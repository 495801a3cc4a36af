// hypermla._hypermla.kernels(), check(), verify() and profile(): the calls of hypermla.h that make their own inputs.
#include "extension.h"
#include "hypermla/hypermla.h"

namespace {

// (kernel, version, device, language, problem, seed, tune): what check() and profile() have in common.
struct Asked {
  const char *kernel, *version, *device, *language;
  std::map<std::string, std::string> problem;
  unsigned long long seed;
  int tune;

  hypermla::RunOptions options() const {
    return {.version = version, .language = language, .seed = seed, .tune = tune != 0, .stop = interrupted};
  }
};

// [(name, full name, language, version, draft, summary)]
PyObject* kernels(PyObject*, PyObject*) {
  return guarded([] {
    return list_of(hypermla::list_kernels(), [](const hypermla::ListedKernel& one) {
      return Py_BuildValue("(ssssNs)", one.name.c_str(), one.full_name.c_str(), one.language.c_str(),
                           one.version.c_str(), PyBool_FromLong(one.draft), one.summary.c_str());
    });
  });
}

// check(...) -> (passed, kernel, seed, [(inputs, output, passed, relative_error)])
PyObject* check(PyObject*, PyObject* arguments) {
  Asked asked;
  PyObject* problem;
  if (!PyArg_ParseTuple(arguments, "ssssO!Kp", &asked.kernel, &asked.version, &asked.device, &asked.language,
                        &PyDict_Type, &problem, &asked.seed, &asked.tune) ||
      !read_fields(problem, asked.problem))
    return nullptr;
  return guarded([&] {
    hypermla::CheckSummary found;
    without_lock([&] {
      found = check_kernel(asked.kernel, asked.problem, hypermla::DeviceHandle(asked.device), asked.options());
    });
    PyObject* outputs = list_of(found.outputs, [](const hypermla::CheckedOutput& one) {
      return Py_BuildValue("(ssNd)", one.inputs.c_str(), one.output.c_str(), PyBool_FromLong(one.passed),
                           one.relative_error);
    });
    return Py_BuildValue("(NsKN)", PyBool_FromLong(found.passed), found.kernel.c_str(),
                         static_cast<unsigned long long>(found.seed), outputs);
  });
}

// profile(..., mode, out_dir, label, bench_runs) -> as Kernel.profile()
PyObject* profile(PyObject*, PyObject* arguments) {
  Asked asked;
  PyObject* problem;
  const char *mode, *out_dir, *label;
  int bench_runs;
  if (!PyArg_ParseTuple(arguments, "ssssO!Kpsssi", &asked.kernel, &asked.version, &asked.device, &asked.language,
                        &PyDict_Type, &problem, &asked.seed, &asked.tune, &mode, &out_dir, &label, &bench_runs) ||
      !read_fields(problem, asked.problem))
    return nullptr;
  return guarded([&] {
    hypermla::ProfileSummary found;
    without_lock([&] {
      found = profile_kernel(asked.kernel, asked.problem, mode, hypermla::DeviceHandle(asked.device), asked.options(),
                             {.out_dir = out_dir, .label = label, .bench_runs = bench_runs});
    });
    return profile_tuple(found);
  });
}

// verify(kernel, version, device, language, record) -> [(kernel, cases, failed, {output: error}, failures)]
PyObject* verify(PyObject*, PyObject* arguments) {
  const char *kernel, *version, *device, *language, *record;
  if (!PyArg_ParseTuple(arguments, "sssss", &kernel, &version, &device, &language, &record)) return nullptr;
  return guarded([&] {
    std::vector<hypermla::VerifySummary> found;
    without_lock([&] {
      found =
          hypermla::verify_kernels(kernel, hypermla::DeviceHandle(device),
                                   {.version = version, .language = language, .record = record, .stop = interrupted});
    });
    return list_of(found, [](const hypermla::VerifySummary& one) {
      PyObject* errors = PyDict_New();
      for (const auto& [output, error] : one.worst_relative_errors) {
        PyObject* value = PyFloat_FromDouble(error);
        if (errors && (!value || PyDict_SetItemString(errors, output.c_str(), value) != 0)) Py_CLEAR(errors);
        Py_XDECREF(value);
      }
      return Py_BuildValue("(siiNs)", one.kernel.c_str(), one.cases, one.failed, errors, one.failures.c_str());
    });
  });
}

PyMethodDef run_methods[] = {{"kernels", kernels, METH_NOARGS, nullptr},
                             {"check", check, METH_VARARGS, nullptr},
                             {"verify", verify, METH_VARARGS, nullptr},
                             {"profile", profile, METH_VARARGS, nullptr},
                             {}};

}  // namespace

bool add_runs(PyObject* module) { return PyModule_AddFunctions(module, run_methods) == 0; }
