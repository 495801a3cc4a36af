// Where a Python tensor lies, read in C: some 50 ns where its type has DLPack's table of C functions (PyTorch 2.10 and
// newer), else by hypermla._tensors.described(), which knows NumPy's arrays and older PyTorch.
#pragma once

#include <Python.h>

#include <initializer_list>
#include <string>

#include "dlpack.h"

struct TensorView {
  static constexpr int kMostAxes = 8;

  void* data;
  DLDevice device;
  int ndim;
  std::uint8_t code, bits;
  // In elements. An axis of one element has the stride that it would have in a dense tensor.
  std::int64_t shape[kMostAxes], strides[kMostAxes];
  const DLPackExchangeAPI* api;  // null where the type has none
  void* stream;                  // the current one of its device, where api is null

  bool is_dense() const;         // row-major
  std::string said() const;      // "bfloat16 [2, 16, 576]"
  void* current_stream() const;  // of its framework, on its device
};

// Throws PythonError with a Python exception, a TypeError for what is no tensor.
TensorView view_of(PyObject* tensor);

// An axis of a wanted shape: a number of elements, or any number under a name.
struct WantedAxis {
  WantedAxis(std::int64_t elements) : size(elements) {}
  WantedAxis(const char* any) : name(any) {}
  std::int64_t size = -1;
  const char* name = nullptr;
};
enum class ElementType { bfloat16, float16, float32, int32, int64 };  // integers of 16 bits carry bfloat16 in NumPy

// Throws Error that names the tensor unless it has that type and shape and lies on that device.
void require(const char* name, const TensorView& view, ElementType type, std::initializer_list<WantedAxis> shape,
             const DLDevice& device);

// The address of a stream: an integer, or an object with .cuda_stream; None: the current one of `tensor`.
void* stream_of(PyObject* stream, const TensorView& tensor);
