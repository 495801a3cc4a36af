// What the files of the extension share.
#pragma once

#include <Python.h>

#include <new>

#include "hypermla/error.h"

inline PyObject* g_error = nullptr;  // hypermla.Error

// Calls `body`, turning what it throws into a Python exception; null then. One that is raised already stays.
template <class Body>
PyObject* guarded(Body&& body) {
  try {
    return body();
  } catch (const hypermla::Error& error) {
    if (!PyErr_Occurred()) PyErr_SetString(g_error, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Adds the type MlaDecode (mla_decode.cpp); false with a Python exception.
bool add_mla_decode(PyObject* module);
