#include "tensor_view.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <vector>

#include "extension.h"
#include "hypermla/base/error.h"
#include "hypermla/plan/memory_rows.h"

namespace {

constexpr const char* kTypeNames[] = {"bfloat16", "float16", "float32", "int32", "int64", "uint8"};

// The table of a type; null where it has none. The last type that had one is remembered: it is PyTorch's.
const DLPackExchangeAPI* api_of(PyTypeObject* type) {
  static PyTypeObject* known = nullptr;
  static const DLPackExchangeAPI* its = nullptr;
  if (type == known) return its;
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (!capsule) return PyErr_Clear(), nullptr;
  auto* api = static_cast<const DLPackExchangeAPI*>(PyCapsule_IsValid(capsule, "dlpack_exchange_api")
                                                        ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
                                                        : nullptr);
  Py_DECREF(capsule);
  while (api && api->major != 1) api = api->previous;
  if (!api || !api->view) return nullptr;
  Py_XDECREF(reinterpret_cast<PyObject*>(known));
  known = reinterpret_cast<PyTypeObject*>(Py_NewRef(reinterpret_cast<PyObject*>(type)));
  return its = api;
}

void copy_axes(PyObject* tuple, std::int64_t* values, int count) {
  for (int i = 0; i < count; ++i) {
    values[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    if (PyErr_Occurred()) throw PythonError();
  }
}

// By Python: (address, type code, bits, shape, strides, device type, device id, stream, whether it is read-only)
void describe(const char* name, PyObject* tensor, TensorView& view) {
  static PyObject* described = nullptr;
  if (!described) {
    PyObject* module = PyImport_ImportModule("hypermla._tensors");
    described = module ? PyObject_GetAttrString(module, "described") : nullptr;
    Py_XDECREF(module);
    if (!described) throw PythonError();
  }
  PyObject* row = PyObject_CallFunction(described, "sO", name, tensor);
  if (!row) throw PythonError();
  const struct Release {
    PyObject* row;
    ~Release() { Py_DECREF(row); }
  } release{row};
  unsigned long long address, stream;
  PyObject *shape, *strides;
  int read_only;
  if (!PyArg_ParseTuple(row, "KbbO!O!iiKp", &address, &view.code, &view.bits, &PyTuple_Type, &shape, &PyTuple_Type,
                        &strides, &view.device.type, &view.device.id, &stream, &read_only))
    throw PythonError();
  view.read_only = read_only;
  view.data = reinterpret_cast<void*>(address);
  view.stream = reinterpret_cast<void*>(stream);
  view.ndim = int(PyTuple_Size(shape));
  if (view.ndim > TensorView::kMostAxes) return;
  copy_axes(shape, view.shape, view.ndim);
  copy_axes(strides, view.strides, view.ndim);
}

bool read_api(PyObject* tensor, TensorView& view) {
  DLTensor of;
  if (view.api->view(tensor, &of) != 0) return PyErr_Clear(), false;  // a tensor without memory of a device
  view.data = static_cast<char*>(of.data) + of.byte_offset;
  view.device = of.device;
  view.code = of.code;
  view.bits = of.lanes == 1 ? of.bits : 0;
  view.ndim = of.ndim;
  if (view.ndim > TensorView::kMostAxes) return true;
  std::int64_t dense = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.shape[i] = of.shape[i];
    view.strides[i] = of.strides ? of.strides[i] : dense;
    dense *= of.shape[i];
  }
  return true;
}

std::string shape_text(std::initializer_list<WantedAxis> shape) {
  std::string text;
  for (const WantedAxis& axis : shape)
    text += (text.empty() ? "" : ", ") + (axis.name ? std::string(axis.name) : std::to_string(axis.size));
  return "[" + text + "]";
}

std::string device_text(const DLDevice& device) {
  if (device.type == kCpu || device.type == kCudaHost) return "in the memory of the CPU";
  return device.type == kCuda ? fmt::format("on GPU {}", device.id) : fmt::format("on a device of another kind");
}

bool is_on(const DLDevice& given, const DLDevice& wanted) {
  if (given.type == kCudaManaged) return true;
  return wanted.type == kCpu ? given.type == kCpu || given.type == kCudaHost
                             : given.type == kCuda && given.id == wanted.id;
}

}  // namespace

std::string TensorView::said() const {
  const char* const kinds[] = {"int", "uint", "float", "", "bfloat"};
  const bool known = code < std::size(kinds) && code != 3 && bits;
  return fmt::format("{}{} [{}]", known ? kinds[code] : "another type", known ? std::to_string(bits) : "",
                     fmt::join(shape, shape + ndim, ", "));
}

void* TensorView::current_stream() const {
  if (device.type != kCuda) return nullptr;
  if (!api) return stream;
  void* current = nullptr;
  if (api->current_stream(device.type, device.id, &current) != 0) throw PythonError();
  return current;
}

TensorView view_of(const char* name, PyObject* tensor) {
  TensorView view;
  view.api = api_of(Py_TYPE(tensor));
  view.stream = nullptr;
  view.read_only = false;
  if (!view.api || !read_api(tensor, view)) {
    view.api = nullptr;
    describe(name, tensor, view);
  }
  if (view.ndim > TensorView::kMostAxes)
    hypermla::fail("{} has {} dimensions; a tensor has at most {} here", name, view.ndim, TensorView::kMostAxes);
  std::int64_t inner = 1;  // elements from one of an axis to the next, where these are dense
  for (int i = view.ndim - 1; i >= 0; --i) {
    if (view.shape[i] == 1) view.strides[i] = inner;
    inner = std::max(inner, view.shape[i] * view.strides[i]);  // an expanded axis has a stride of 0
  }
  if (!view.data && !std::count(view.shape, view.shape + view.ndim, 0))  // no address: not given
    hypermla::fail("{} has no memory of its own here, as a DTensor or one on \"meta\"; give the local tensor", name);
  return view;
}

void require(const char* name, const TensorView& view, ElementType type, std::initializer_list<WantedAxis> shape,
             const DLDevice& device) {
  constexpr std::uint8_t kBits[] = {16, 16, 32, 32, 64, 8}, kCodes[] = {kBfloat, kFloat, kFloat, kInt, kInt, kUInt};
  const std::uint8_t bits = kBits[int(type)], code = kCodes[int(type)];
  bool fits = view.bits == bits && (view.code == code || (type == ElementType::bfloat16 && view.code == kUInt)) &&
              view.ndim == int(shape.size());
  const std::int64_t* size = view.shape;
  for (auto axis = shape.begin(); fits && axis != shape.end(); ++axis, ++size) fits = axis->name || axis->size == *size;
  if (!fits) hypermla::fail("{} must be {} {}, not {}", name, kTypeNames[int(type)], shape_text(shape), view.said());
  if (!is_on(view.device, device))
    hypermla::fail("{} must be {}, not {}; copy it first", name, device_text(device), device_text(view.device));
}

void require_dense_columns(const char* name, const TensorView& view) {
  const bool empty = std::count(view.shape, view.shape + view.ndim, 0) > 0;  // NumPy gives it any strides
  if (view.ndim > 0 && !empty && view.strides[view.ndim - 1] != 1)
    hypermla::fail("{} must be dense in its last dimension; copy it first", name);
}

void require_output(const char* name, const TensorView& view, bool apart) {
  if (view.read_only) hypermla::fail("{} is written and must not be read-only; copy it first", name);
  if (!apart || std::count(view.shape, view.shape + view.ndim, 0) > 0) return;
  std::vector<int> order(std::size_t(view.ndim));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return view.strides[a] < view.strides[b]; });
  std::int64_t span = 1;  // elements that the axes so far reach over
  for (const int axis : order) {
    if (view.shape[axis] > 1 && view.strides[axis] < span)
      hypermla::fail("{} is written and its elements must have places of their own; copy it first", name);
    span += (view.shape[axis] - 1) * view.strides[axis];
  }
}

void require_apart(const char* name, const TensorView& out,
                   std::initializer_list<std::pair<const char*, const TensorView*>> inputs) {
  const auto memory = [](const TensorView& of) {
    return hypermla::memory_rows(of.data, of.bits / 8, of.shape[0], of.strides[0], of.shape[1], of.strides[1],
                                 of.ndim > 2 ? of.shape[2] : 1);
  };
  const auto is_empty = [](const TensorView& of) { return std::count(of.shape, of.shape + of.ndim, 0) > 0; };
  for (const auto& [of_input, input] : inputs)
    if (!is_empty(out) && !is_empty(*input) && overlap(memory(out), memory(*input)))
      hypermla::fail("{} shares memory with {}; give it memory of its own", name, of_input);
}

void* workspace_of(PyObject* given, std::size_t bytes, const DLDevice& device) {
  const TensorView view = view_of("the workspace", given);
  std::int64_t elements = 1;
  for (int i = view.ndim - 1; i >= 0; elements *= view.shape[i--])
    if (view.shape[i] > 1 && view.strides[i] != elements) hypermla::fail("the workspace must be dense; make it anew");
  if (!is_on(view.device, device))
    hypermla::fail("the workspace must be {}, not {}; make it there", device_text(device), device_text(view.device));
  require_output("the workspace", view);
  if (const std::size_t given_bytes = std::size_t(elements) * view.bits / 8; given_bytes < bytes)
    hypermla::fail("the workspace has {} bytes, but {} are needed; workspace_bytes says how many", given_bytes, bytes);
  return view.data;
}

const float* floats_of(const char* name, PyObject* given, std::int64_t count, const DLDevice& device) {
  if (given == Py_None) return nullptr;
  const TensorView view = view_of(name, given);
  require(name, view, ElementType::float32, {count}, device);
  require_dense_columns(name, view);
  return static_cast<const float*>(view.data);
}

ColumnParts::ColumnParts(const char* name, PyObject* given, ElementType type, WantedAxis rows, std::int64_t middle,
                         std::int64_t first_columns, std::int64_t second_columns, const DLDevice& device) {
  const bool pair = PyTuple_Check(given);
  if (pair && PyTuple_Size(given) != 2) hypermla::fail("{} must be a tensor or a pair of two", name);
  const auto read = [&](PyObject* tensor, const std::string& its, std::int64_t columns) {
    const TensorView view = view_of(its.c_str(), tensor);
    require(its.c_str(), view, type, {rows, middle, columns}, device);
    require_dense_columns(its.c_str(), view);
    return view;
  };
  if (!pair) {
    first = second = read(given, name, first_columns + second_columns);
    second.data = static_cast<char*>(second.data) + first.bits / 8 * first_columns;
    first.shape[2] = first_columns;
    second.shape[2] = second_columns;
    return;
  }
  first = read(PyTuple_GetItem(given, 0), std::string(name) + "[0]", first_columns);
  rows = first.shape[0];
  second = read(PyTuple_GetItem(given, 1), std::string(name) + "[1]", second_columns);
}

int extent(const char* name, std::int64_t value) {
  if (value < 0 || value > std::numeric_limits<int>::max())
    hypermla::fail("{}={} is not supported: it must fit 31 bits", name, value);
  return int(value);
}

ElementType type_of(hypermla::DType half) {
  return half == hypermla::DType::float16 ? ElementType::float16 : ElementType::bfloat16;
}

DLDevice device_of(const hypermla::DeviceHandle& handle, const char* name) {
  const char* ordinal = std::strchr(name, ':');
  return {handle.is_gpu() ? kCuda : kCpu, ordinal ? std::atoi(ordinal + 1) : 0};
}

PyObject* name_of(const DLDevice& device) {
  return device.type == kCpu ? PyUnicode_FromString("cpu") : PyUnicode_FromFormat("cuda:%d", int(device.id));
}

void* stream_of(PyObject* stream, const TensorView& tensor) {
  if (stream == Py_None) return tensor.current_stream();
  PyObject* address = PyLong_Check(stream) ? Py_NewRef(stream) : PyObject_GetAttrString(stream, "cuda_stream");
  void* value = address ? PyLong_AsVoidPtr(address) : nullptr;
  Py_XDECREF(address);
  if (!PyErr_Occurred()) return value;
  if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
    PyErr_Clear();
    hypermla::fail("stream is no address of a stream; leave it out for the current one");
  }
  if (PyErr_ExceptionMatches(PyExc_AttributeError))
    PyErr_SetString(PyExc_TypeError, "stream must be an address or an object with .cuda_stream");
  throw PythonError();
}
