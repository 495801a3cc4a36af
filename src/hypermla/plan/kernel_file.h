// Stand-alone kernel files (hypermla/kernel_file.h, docs/kernel-files.md): compiled, described, run and compared with
// the reference that they hold.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hypermla/compile/compiler.h"
#include "hypermla/device/device.h"
#include "hypermla/kernel_file.h"
#include "hypermla/plan/plan.h"

namespace hypermla {

// A size of a kernel file's problem: a flag.
struct FileSize {
  std::string name, help;
  std::int64_t timed = 0, checked = 0;
};

struct FileTensor {
  std::string name;
  Role role = Role::input;
  DType dtype = DType::bfloat16;
  std::vector<std::int64_t> shape;
  int vector = 1;  // elements of the innermost dimension that the kernel moves at once
  Fill fill = nullptr;

  std::int64_t elements() const { return Tensor{nullptr, dtype, shape}.elements(); }
  std::size_t bytes() const { return Tensor{nullptr, dtype, shape}.bytes(); }
};

// One argument of the kernel: the address of a tensor, a tensor map where there are boxes, or else bytes.
struct FileArgument {
  int tensor = -1;
  int box_rows = 0, box_groups = 0;
  std::string bytes;
};

// What the file says for one set of sizes.
struct FileProblem {
  std::vector<FileSize> sizes;
  std::vector<std::int64_t> values;  // of the sizes
  std::vector<FileTensor> tensors;
  std::vector<FileArgument> arguments;
  std::string language, instance;
  Grid grid;
  LaunchShape shape;
  Cost cost;
  double rtol = -1, atol = -1;  // negative: by the type of the output

  std::int64_t rows() const;  // of the outputs: what the reference makes one by one
};

class FileLibrary {
 public:
  // Compiles and loads the host part. Throws Error when another user may write the file or what it includes, or when it
  // does not compile.
  FileLibrary(const std::filesystem::path& file, Compiler& compiler);

  const std::filesystem::path& path() const { return path_; }
  const std::string& name() const { return name_; }

  // For the sizes that are given by name; the others are those of a timed run, or of a check. Throws Error, a sentence
  // that names the file, when describe() failed or what it says cannot be.
  FileProblem describe(const std::map<std::string, std::int64_t>& given, bool timed, int processors) const;
  KernelSource source(const FileProblem& problem) const;  // of the device part
  // One row of every output. Any thread.
  void reference(const KernelFileRow& row) const;

 private:
  std::filesystem::path path_;
  std::string name_;
  const char* (*describe_)(const KernelFileCalls*) = nullptr;
  const char* (*reference_)(const KernelFileRow*) = nullptr;
};

struct FileOutputError {
  std::string output;
  std::int64_t compared = 0, wrong = 0;  // elements
  // Where |got - expected| is the largest part of what is allowed; NaN is larger than all others.
  std::vector<std::int64_t> position;
  double got = 0, expected = 0, allowed = 0;
};
struct FileCheck {
  std::string failure;  // the sentence that says what is wrong; empty: passed
  std::int64_t rows = 0, rows_compared = 0;
  std::vector<FileOutputError> outputs;
};

// A problem of a kernel file on a device: its memory, and its kernel, compiled and loaded.
class FileRun {
 public:
  // Inputs are made from `seed`. Every tensor lies between guards of 4 KiB: NaN around inputs, a pattern around
  // outputs.
  FileRun(const FileLibrary& library, FileProblem problem, std::shared_ptr<Device> device, Compiler& compiler,
          std::uint64_t seed);

  const CacheEntry& entry() const { return entry_; }
  void run(StreamHandle stream) { function_->launch(problem_.grid, pointers_.data(), stream); }

  // Poisons the outputs with NaN, runs once and compares: all rows where the reference takes less than `seconds`, else
  // the first, the last, random ones and those that hold a NaN. Negative tolerances: those of the file.
  FileCheck check(double rtol, double atol, double seconds);

 private:
  void fill(std::uint64_t seed);
  void pack();
  std::string damage() const;  // what the kernel wrote beside its outputs, as a sentence

  const FileLibrary& library_;
  FileProblem problem_;
  std::shared_ptr<Device> device_;
  std::uint64_t seed_;
  std::vector<Buffer> buffers_;    // one a tensor, guards included
  std::vector<std::string> host_;  // the bytes of inputs
  CacheEntry entry_;
  std::unique_ptr<Function> function_;
  std::vector<std::string> packed_;
  std::vector<void*> pointers_;
};

}  // namespace hypermla
