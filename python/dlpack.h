// DLPack's structures, version 1.3 (github.com/dmlc/dlpack, include/dlpack/dlpack.h), as far as they are read here:
// what __dlpack__() puts into a capsule, and the table of C functions that a type has as __dlpack_c_exchange_api__.
#pragma once

#include <cstdint>

struct DLDevice {
  std::int32_t type, id;
};
enum : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };  // DLDevice::type

struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: dense and row-major
  std::uint64_t byte_offset;
};
enum : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4 };  // DLTensor::code

struct DLManagedTensorVersioned {
  std::uint32_t major, minor;
  void* manager_context;
  void (*deleter)(DLManagedTensorVersioned*);
  std::uint64_t flags;
  DLTensor tensor;
};
constexpr std::uint64_t kReadOnly = 1;

// Functions that are called here return 0, or -1 with a Python exception.
struct DLPackExchangeAPI {
  std::uint32_t major, minor;
  DLPackExchangeAPI* previous;  // for an older major version; may be null
  void *allocate, *export_object, *import_object;
  // What a Python object holds; shape and strides stay the object's. May be null.
  int (*view)(void* object, DLTensor* tensor);
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};
