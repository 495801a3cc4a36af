// What the files of the extension share.
#pragma once

#include <Python.h>

#include <exception>
#include <map>
#include <new>
#include <string>

#include "hypermla/dtype.h"
#include "hypermla/error.h"
#include "hypermla/profile.h"

inline PyObject* g_error = nullptr;  // hypermla.Error

// What the library says of fields and flags, in Python's words: `--dtype=float32` is dtype="float32" there, `--b` is b.
// What stands between backticks is a command, and stays one.
std::string python_words(const std::string& sentence);

// A Python exception is raised already; guarded() returns null for it.
struct PythonError {};

// Calls `body`, turning what it throws into a Python exception; null then. One that is raised already stays.
template <class Body>
PyObject* guarded(Body&& body) {
  try {
    return body();
  } catch (const hypermla::Error& error) {
    if (!PyErr_Occurred()) PyErr_SetString(g_error, python_words(error.what()).c_str());
  } catch (const PythonError&) {
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Calls `body` without the interpreter lock. Taking the lock back ends a daemon thread whose interpreter is gone, by an
// unwinding that may not begin in a destructor: that would end the process.
template <class Body>
void without_lock(Body&& body) {
  std::exception_ptr failure;
  PyThreadState* state = PyEval_SaveThread();
  try {
    body();
  } catch (...) {
    failure = std::current_exception();
  }
  PyEval_RestoreThread(state);
  if (failure) std::rethrow_exception(failure);
}

// For METH_FASTCALL: false with a TypeError for another number of arguments; a function as a table of methods has it.
inline bool gets_arguments(Py_ssize_t given, Py_ssize_t wanted) {
  if (given != wanted) PyErr_Format(PyExc_TypeError, "%zd arguments are expected, not %zd", wanted, given);
  return given == wanted;
}
template <class F>
PyCFunction fast_function(F* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// A list of what `row` makes of each value.
template <class Values, class Row>
PyObject* list_of(const Values& values, Row&& row) {
  PyObject* list = PyList_New(0);
  for (const auto& value : values) {
    PyObject* one = list ? row(value) : nullptr;
    if (list && (!one || PyList_Append(list, one) != 0)) Py_CLEAR(list);
    Py_XDECREF(one);
  }
  return list;
}

// The fields of a problem, from dict[str, str]; false with a Python exception.
bool read_fields(PyObject* problem, std::map<std::string, std::string>& fields);

// (directory, missing, cold, burst, sustained, (bottleneck, confidence, why), [opportunity], [(stage, burst,
// [metric])])
PyObject* profile_tuple(const hypermla::ProfileSummary& summary);

// For Ctrl-C during a call without the interpreter lock: Python's handlers of signals run when asked for only, and
// raise KeyboardInterrupt.
bool interrupted();

// Throws Error for other names than those of the types of 16 bits.
hypermla::DType half_precision(const std::string& name);
// Throws Error where rounding made a 0 of it, which would stand for the default.
float scale_of(double scale);

// Adds the type MlaDecode (mla_decode.cpp); false with a Python exception.
bool add_mla_decode(PyObject* module);
bool add_mla_prefill(PyObject* module);  // the type MlaPrefill (mla_prefill.cpp)
bool add_mla_cache(PyObject* module);    // merge_states, append, decompress_prefix, split_prefixes (mla_cache.cpp)
bool add_runs(PyObject* module);         // kernels, check, verify, profile (runs.cpp)
