// What the host part of a stand-alone kernel file includes: one C++ file that holds a kernel, its reference and its
// inputs, for `hypermla verify-file` and `hypermla bench-file` (docs/kernel-files.md). Nothing of the framework.
//
//   #ifdef HYPERMLA_DEVICE
//   ... the kernel, in CUDA Tile C++ ("cutile") or CUDA C++ ("cute") ...
//   #else
//   #include "hypermla/kernel_file.h"
//   void describe(hypermla::KernelFile& file) { ... }
//   void reference(const hypermla::Row& at) { ... }
//   HYPERMLA_KERNEL_FILE(describe, reference)
//   #endif
//
// The file is compiled twice: with HYPERMLA_DEVICE as device code and without it, by the host's C++20 compiler, as a
// library that the program loads. Between the two lies a C interface, so any compiler and standard library fit.
#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "hypermla/dtype.h"

namespace hypermla {

// The value of an element of an input: its index, and a standard normal number. What it returns is rounded to the type.
using Fill = double (*)(std::int64_t index, double normal);

// How the program answers describe(). All indices of tensors are those that tensor() returned.
struct KernelFileCalls {
  void* self;
  std::int64_t (*size)(void* self, const char* name, const char* help, std::int64_t timed, std::int64_t checked);
  int (*tensor)(void* self, const char* name, int is_output, int dtype, const std::int64_t* shape, int rank, int vector,
                Fill fill);
  void (*kernel)(void* self, const char* language, const char* instance);
  void (*launch)(void* self, const std::int64_t* grid, int threads, int shared_bytes, int cluster);
  void (*pass_tensor)(void* self, int tensor);
  void (*pass_map)(void* self, int tensor, int box_rows, int box_groups);
  void (*pass_value)(void* self, const void* bytes, int count);
  void (*work)(void* self, double flops, double bytes);
  void (*tolerance)(void* self, double rtol, double atol);
  int (*processors)(void* self);
};

// What describe() says of the kernel, for the sizes of this run.
class KernelFile {
 public:
  explicit KernelFile(const KernelFileCalls& calls) : calls_(calls) {}

  // A size of the problem, which is a flag of both commands: --<name>. `timed` is what bench-file takes on a GPU,
  // `checked` what a check takes: small and odd, so that tiles end in the middle.
  std::int64_t size(const std::string& name, std::int64_t timed, std::int64_t checked, const std::string& help) {
    return calls_.size(calls_.self, name.c_str(), help.c_str(), timed, checked);
  }

  // Dense, row-major tensors whose first element is aligned to 256 bytes. `vector`: elements of the innermost dimension
  // that the kernel moves at once; an extent that is no multiple of it is refused, so rows stay aligned. Returns the
  // index of the tensor.
  int input(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape, int vector,
            Fill fill = nullptr) {
    return calls_.tensor(calls_.self, name.c_str(), 0, int(dtype), shape.data(), int(shape.size()), vector, fill);
  }
  // The first dimension of every output counts the rows that reference() makes.
  int output(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape, int vector) {
    return calls_.tensor(calls_.self, name.c_str(), 1, int(dtype), shape.data(), int(shape.size()), vector, nullptr);
  }

  // The kernel's language, "cutile" or "cute", and its instance: `copy` or, of a template, `copy<256, 8>`.
  void kernel(const std::string& language, const std::string& instance) {
    calls_.kernel(calls_.self, language.c_str(), instance.c_str());
  }
  // Thread blocks along x, y, z. Threads, bytes of dynamic shared memory and blocks of a cluster are the kernel's own
  // choice in cutile.
  void launch(std::int64_t x, std::int64_t y = 1, std::int64_t z = 1, int threads = 1, int shared_bytes = 0,
              int cluster = 1) {
    const std::int64_t grid[] = {x, y, z};
    calls_.launch(calls_.self, grid, threads, shared_bytes, cluster);
  }

  // The kernel's arguments, in its order: the address of a tensor; a tensor map of a matrix of 16-bit elements for
  // boxes of `box_rows` rows and `box_groups` times 64 columns with the 128-byte swizzle (hypermla/tensor_map.h); a
  // number or a struct.
  void pass(int tensor) { calls_.pass_tensor(calls_.self, tensor); }
  void pass_map(int tensor, int box_rows, int box_groups) {
    calls_.pass_map(calls_.self, tensor, box_rows, box_groups);
  }
  template <class Value>
  void pass_value(const Value& value) {
    static_assert(std::is_trivially_copyable_v<Value>);
    calls_.pass_value(calls_.self, &value, int(sizeof value));
  }

  // The algorithm's work: arithmetic (a multiply-add counts two), and bytes with each tensor moved once.
  void work(double flops, double bytes) { calls_.work(calls_.self, flops, bytes); }
  // An output may differ from the reference by atol + rtol * |reference|. --rtol and --atol override it. Without it
  // rtol is 1e-2 for bfloat16, 2e-3 for float16, 1e-5 for float32, and atol the same.
  void tolerance(double rtol, double atol) { calls_.tolerance(calls_.self, rtol, atol); }

  int processors() const { return calls_.processors(calls_.self); }  // SMs of the device, or cores

 private:
  const KernelFileCalls& calls_;
};

// A tensor as reference() reads it.
class Values {
 public:
  Values(const void* data, DType dtype) : data_(data), dtype_(dtype) {}
  double operator[](std::int64_t i) const {
    switch (dtype_) {
      case DType::float32:
        return static_cast<const float*>(data_)[i];
      case DType::int32:
        return static_cast<const std::int32_t*>(data_)[i];
      case DType::bfloat16:
        return from_bits(std::uint32_t{halves()[i]} << 16);
      case DType::float16:
        break;
    }
    const std::uint32_t bits = halves()[i], magnitude = bits & 0x7fff, sign = (bits & 0x8000) << 16;
    if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | magnitude << 13);  // infinity, NaN
    const float unscaled = from_bits(sign | magnitude << 13);                        // its exponent is 112 too small
    return double(unscaled) * 0x1p112;
  }

 private:
  static float from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  const std::uint16_t* halves() const { return static_cast<const std::uint16_t*>(data_); }

  const void* data_;
  DType dtype_;
};

// What reference() gets; inputs and outputs each count from 0, in the order in which they were declared.
struct KernelFileRow {
  std::int64_t row;
  const std::int64_t* sizes;  // in the order in which describe() asked
  const void* const* inputs;
  const int* dtypes;       // of the inputs
  double* const* outputs;  // the elements of this row
  int size_count, input_count, output_count;
};

// One row of the outputs. Rows are made by several threads at once.
class Row {
 public:
  explicit Row(const KernelFileRow& row) : row(row.row), from_(row) {}
  const std::int64_t row;
  std::int64_t size(int i) const { return from_.sizes[checked("size", i, from_.size_count)]; }
  Values input(int i) const {
    checked("input", i, from_.input_count);
    return {from_.inputs[i], DType(from_.dtypes[i])};
  }
  double* output(int i) const { return from_.outputs[checked("output", i, from_.output_count)]; }

 private:
  static int checked(const char* what, int i, int count) {
    if (i >= 0 && i < count) return i;
    throw std::out_of_range(std::string(what) + '(' + std::to_string(i) + ") is not there: there are " +
                            std::to_string(count) + ", which count from 0");
  }

  const KernelFileRow& from_;
};

// Runs the part of the file; the text of what it throws, or null. It lives until this thread's next failure.
template <class Part>
const char* run_part(Part&& part) {
  thread_local std::string failure;
  try {
    part();
    return nullptr;
  } catch (const std::exception& error) {
    failure = error.what();
  } catch (...) {
    failure = "it threw something that is no std::exception";
  }
  return failure.c_str();
}

}  // namespace hypermla

#define HYPERMLA_KERNEL_FILE(describe, reference)                                                                   \
  extern "C" [[gnu::visibility("default")]] const char* hypermla_describe(const hypermla::KernelFileCalls* calls) { \
    return hypermla::run_part([&] {                                                                                 \
      hypermla::KernelFile file(*calls);                                                                            \
      describe(file);                                                                                               \
    });                                                                                                             \
  }                                                                                                                 \
  extern "C" [[gnu::visibility("default")]] const char* hypermla_reference(const hypermla::KernelFileRow* row) {    \
    return hypermla::run_part([&] { reference(hypermla::Row(*row)); });                                             \
  }
