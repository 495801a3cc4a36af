// Where a Python tensor lies, read in C: some 50 ns where its type has DLPack's table of C functions (PyTorch 2.10 and
// newer), else by hypermla._tensors.described(), which knows NumPy's arrays and older PyTorch.
#pragma once

#include <Python.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "dlpack.h"
#include "hypermla/hypermla.h"

struct TensorView {
  static constexpr int kMostAxes = 8;

  void* data;
  DLDevice device;
  int ndim;
  std::uint8_t code, bits;
  bool read_only;
  // In elements. An axis of one element has the stride that it would have in a dense tensor.
  std::int64_t shape[kMostAxes], strides[kMostAxes];
  const DLPackExchangeAPI* api;  // null where the type has none
  void* stream;                  // the current one of its device, where api is null

  std::string said() const;      // "bfloat16 [2, 16, 576]"
  void* current_stream() const;  // of its framework, on its device
};

// Throws PythonError with a Python exception, for what is no tensor a TypeError that has the name.
TensorView view_of(const char* name, PyObject* tensor);

// An axis of a wanted shape: a number of elements, or any number under a name.
struct WantedAxis {
  WantedAxis(std::int64_t elements) : size(elements) {}
  WantedAxis(const char* any) : name(any) {}
  std::int64_t size = -1;
  const char* name = nullptr;
};
enum class ElementType {
  bfloat16,
  float16,
  float32,
  int32,
  int64,
  uint8
};  // integers of 16 bits carry bfloat16 in NumPy

// Throws Error that names the tensor unless it has that type and shape and lies on that device.
void require(const char* name, const TensorView& view, ElementType type, std::initializer_list<WantedAxis> shape,
             const DLDevice& device);
// Throws Error that names the tensor unless its last dimension is dense, or it is empty.
void require_dense_columns(const char* name, const TensorView& view);
// Throws Error that names the tensor where it may not be written; with `apart` also where elements share a place.
void require_output(const char* name, const TensorView& view, bool apart = false);
// Throws Error that names both where `out` shares memory with an input. Of three axes the last is dense.
void require_apart(const char* name, const TensorView& out,
                   std::initializer_list<std::pair<const char*, const TensorView*>> inputs);
// The address of a workspace of at least so many bytes, dense, on that device.
void* workspace_of(PyObject* given, std::size_t bytes, const DLDevice& device);
// The address of float32 [count], dense; of None null.
const float* floats_of(const char* name, PyObject* given, std::int64_t count, const DLDevice& device);

// A tensor [rows, middle, first + second columns], or a pair of one of the first columns and one of the second: its two
// parts. Throws Error as require() does, and where columns are not dense.
struct ColumnParts {
  ColumnParts(const char* name, PyObject* given, ElementType type, WantedAxis rows, std::int64_t middle,
              std::int64_t first_columns, std::int64_t second_columns, const DLDevice& device);
  TensorView first, second;
};

// An extent for the library; throws Error where it does not fit 31 bits.
int extent(const char* name, std::int64_t value);

ElementType type_of(hypermla::DType half);
// The device of a handle that was made by this name, "cuda:1"; and the other way, "cpu" or "cuda:0".
DLDevice device_of(const hypermla::DeviceHandle& handle, const char* name);
PyObject* name_of(const DLDevice& device);

// The address of a stream: an integer, or an object with .cuda_stream; None: the current one of `tensor`.
void* stream_of(PyObject* stream, const TensorView& tensor);
