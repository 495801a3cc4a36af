#include "hypermla/plan/kernel_file.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/pattern.h"
#include "hypermla/base/process.h"
#include "hypermla/compile/source_text.h"
#include "hypermla/device/tensor_map.h"
#include "hypermla/plan/inputs.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kGuardBytes = 4096;
constexpr unsigned char kGuard = 0xa5, kPoison = 0xff;  // the latter is NaN in every floating-point type
constexpr unsigned char kPoisonOfIntegers = 0x5a;       // of outputs: -1 is what lists of indices are filled up with
constexpr std::int64_t kMostOfSize = std::int64_t{1} << 31;

bool is_word(const std::string& text) { return Pattern("[A-Za-z][A-Za-z0-9_]*").match(text).has_value(); }

// What describe() says, as it says it. Its calls come from another library, which no exception may cross: the first
// error is kept.
struct Recorder {
  const std::map<std::string, std::int64_t>& given;
  bool timed;
  int processors;
  FileProblem problem;
  std::string error;

  template <class Call>
  auto keep(Call&& call) -> decltype(call()) {
    try {
      if (error.empty()) return call();
    } catch (const std::exception& failure) {
      error = failure.what();
    }
    return decltype(call())();
  }

  std::int64_t size(std::string name, std::string help, std::int64_t of_timing, std::int64_t of_check) {
    if (!is_word(name)) fail("the size '{}' is no name; give it letters, digits and _", name);
    for (const FileSize& other : problem.sizes)
      if (other.name == name) fail("the size '{}' is asked for twice; keep what the first call returns", name);
    const auto found = given.find(name);
    const std::int64_t value = found != given.end() ? found->second : timed ? of_timing : of_check;
    if (value < 1 || value >= kMostOfSize)
      fail("--{}={} is not supported: it must be from 1 to {}", name, value, kMostOfSize - 1);
    problem.sizes.push_back({name, help, of_timing, of_check});
    problem.values.push_back(value);
    return value;
  }
  int tensor(FileTensor tensor) {
    if (!is_word(tensor.name)) fail("the tensor '{}' is no name; give it letters, digits and _", tensor.name);
    for (const FileTensor& other : problem.tensors)
      if (other.name == tensor.name) fail("there are two tensors called {}; rename one", tensor.name);
    if (tensor.shape.empty()) fail("{} has no dimension; an output of one number has the shape {{1}}", tensor.name);
    double elements = 1;
    for (const std::int64_t extent : tensor.shape) {
      if (extent < 1) fail("{} has a dimension of {} elements; each must be at least 1", tensor.name, extent);
      elements *= double(extent);
    }
    if (elements > 0x1p45) fail("{} has {:.3g} elements; choose smaller sizes", tensor.name, elements);
    if (tensor.vector < 1)
      fail("{} is moved by {} elements at once; it must be at least 1", tensor.name, tensor.vector);
    const std::int64_t inner = tensor.shape.back();
    if (inner % tensor.vector)
      fail("{} has {} elements in a row, but the kernel moves {} of them ({} bytes) at once; choose a multiple of {}",
           tensor.name, inner, tensor.vector, tensor.vector * dtype_bytes(tensor.dtype), tensor.vector);
    problem.tensors.push_back(std::move(tensor));
    return int(problem.tensors.size()) - 1;
  }
  void argument(FileArgument argument) {
    if (argument.bytes.empty() && (argument.tensor < 0 || argument.tensor >= int(problem.tensors.size())))
      fail("an argument is tensor number {}, but there are {}; pass what input() or output() returned", argument.tensor,
           problem.tensors.size());
    problem.arguments.push_back(std::move(argument));
  }
  void map(int tensor, int box_rows, int box_groups) {
    argument({tensor, box_rows, box_groups, ""});
    const FileTensor& of = problem.tensors[tensor];
    const bool half = of.dtype == DType::bfloat16 || of.dtype == DType::float16;
    if (of.shape.size() != 2 || !half || of.shape[1] % 64)
      fail("a tensor map of {} is not possible: it must be a matrix of 16-bit elements, a multiple of 64 in a row",
           of.name);
    if (box_rows < 1 || box_rows > 256 || box_groups < 1)
      fail("a box of {} rows and {} groups of {} is not possible; a box has from 1 to 256 rows", box_rows, box_groups,
           of.name);
  }
  void launch(const std::int64_t* blocks, LaunchShape shape) {
    for (int axis = 0; axis < 3; ++axis)
      if (blocks[axis] < 1 || blocks[axis] > (axis == 0 ? kMostOfSize - 1 : 65535))
        fail("a launch of {} x {} x {} blocks is not possible; a grid has from 1 to 2147483647 along x, to 65535 else",
             blocks[0], blocks[1], blocks[2]);
    problem.grid = {unsigned(blocks[0]), unsigned(blocks[1]), unsigned(blocks[2])};
    problem.shape = shape;
  }
  // After the last call.
  void finish() {
    if (problem.instance.empty()) fail("describe() names no kernel; call kernel()");
    if (problem.language != "cutile" && problem.language != "cute")
      fail("the language '{}' is unknown; it is cutile (CUDA Tile C++) or cute (CUDA C++)", problem.language);
    if (problem.arguments.empty()) fail("describe() passes no argument to the kernel; call pass()");
    if (problem.grid.blocks() < 1) fail("describe() launches no block; call launch()");
    std::int64_t rows = 0;
    for (const FileTensor& tensor : problem.tensors) {
      if (tensor.role != Role::output) continue;
      if (rows && tensor.shape[0] != rows)
        fail("the outputs have {} and {} rows; the first dimension of all must be the same", rows, tensor.shape[0]);
      rows = tensor.shape[0];
    }
    if (rows == 0) fail("describe() declares no output; call output()");
    for (const FileArgument& argument : problem.arguments)
      if (argument.box_rows > 0 && problem.language == "cutile")
        fail("a kernel in cutile takes no tensor maps; pass the tensor");
    const LaunchShape& shape = problem.shape;
    if (problem.language == "cutile" && shape != LaunchShape{})
      fail("a kernel in cutile chooses its threads, shared memory and cluster itself; leave them out of launch()");
    if (shape.threads < 1 || shape.threads > 1024 || shape.cluster < 1 || problem.grid.x % shape.cluster)
      fail("{} threads in clusters of {} blocks are not possible; take up to 1024, and clusters that divide the grid",
           shape.threads, shape.cluster);
  }
};

KernelFileCalls calls_of(Recorder& recorder) {
  KernelFileCalls calls;
  calls.self = &recorder;
  calls.size = [](void* self, const char* name, const char* help, std::int64_t timed, std::int64_t checked) {
    auto& to = *static_cast<Recorder*>(self);
    // A wrong size must not divide by zero in describe(), which goes on.
    return std::max<std::int64_t>(1, to.keep([&] { return to.size(name, help, timed, checked); }));
  };
  calls.tensor = [](void* self, const char* name, int is_output, int dtype, const std::int64_t* shape, int rank,
                    int vector, Fill fill) {
    auto& to = *static_cast<Recorder*>(self);
    return to.keep([&] {
      return to.tensor(
          {name, is_output ? Role::output : Role::input, DType(dtype), {shape, shape + rank}, vector, fill});
    });
  };
  calls.kernel = [](void* self, const char* language, const char* instance) {
    FileProblem& problem = static_cast<Recorder*>(self)->problem;
    problem.language = language;
    problem.instance = instance;
  };
  calls.launch = [](void* self, const std::int64_t* grid, int threads, int shared_bytes, int cluster) {
    auto& to = *static_cast<Recorder*>(self);
    to.keep([&] { to.launch(grid, {unsigned(threads), unsigned(shared_bytes), unsigned(cluster)}); });
  };
  calls.pass_tensor = [](void* self, int tensor) {
    auto& to = *static_cast<Recorder*>(self);
    to.keep([&] { to.argument({tensor, 0, 0, ""}); });
  };
  calls.pass_map = [](void* self, int tensor, int box_rows, int box_groups) {
    auto& to = *static_cast<Recorder*>(self);
    to.keep([&] { to.map(tensor, box_rows, box_groups); });
  };
  calls.pass_value = [](void* self, const void* bytes, int count) {
    auto& to = *static_cast<Recorder*>(self);
    to.keep([&] { to.argument({-1, 0, 0, std::string(static_cast<const char*>(bytes), std::size_t(count))}); });
  };
  calls.work = [](void* self, double flops, double bytes) {
    static_cast<Recorder*>(self)->problem.cost = {flops, bytes};
  };
  calls.tolerance = [](void* self, double rtol, double atol) {
    FileProblem& problem = static_cast<Recorder*>(self)->problem;
    problem.rtol = rtol;
    problem.atol = atol;
  };
  calls.processors = [](void* self) { return static_cast<Recorder*>(self)->processors; };
  return calls;
}

// What rounding to the type of an output and sums in fp32 explain.
double usual_tolerance(DType dtype) {
  return dtype == DType::bfloat16 ? 1e-2 : dtype == DType::float16 ? 2e-3 : dtype == DType::float32 ? 1e-5 : 0;
}

void store(char* bytes, std::int64_t i, DType dtype, double value) {
  if (dtype == DType::float32)
    reinterpret_cast<float*>(bytes)[i] = float(value);
  else if (dtype == DType::int32)
    reinterpret_cast<std::int32_t*>(bytes)[i] = std::int32_t(value);
  else
    reinterpret_cast<std::uint16_t*>(bytes)[i] = to_half_bits(float(value), dtype);
}

// On all cores; `work` takes the number of its thread and how many there are. Throws what one of them threw.
void in_parallel(const std::function<void(unsigned, unsigned)>& work) {
  const unsigned count = std::max(1u, std::thread::hardware_concurrency());
  std::mutex mutex;
  std::exception_ptr failure;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < count; ++i)
    threads.emplace_back([&, i] {
      const SignalStack stack;  // reference() is somebody's, and may need more than this thread's
      try {
        work(i, count);
      } catch (...) {
        std::lock_guard lock(mutex);
        failure = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

std::int64_t FileProblem::rows() const {
  for (const FileTensor& tensor : tensors)
    if (tensor.role == Role::output) return tensor.shape[0];
  return 0;
}

FileLibrary::FileLibrary(const fs::path& file, Compiler& compiler) {
  constexpr std::string_view kAdvice = "copy it to a place of your own";
  std::error_code unknown;  // a path without rights, a loop of links, or a name that is too long
  if (!fs::is_regular_file(file, unknown))
    fail("'{}' is no file; give the path of a kernel file (docs/kernel-files.md)", file.string());
  path_ = fs::canonical(file);
  name_ = path_.stem().string();
  if (!is_word(name_) || path_.string().find_first_of("\"\\\n") != std::string::npos)
    fail("'{}' cannot be compiled under this name; give it letters, digits and _, and its directory no quotes",
         path_.string());
  require_trusted(path_, kAdvice);
  KernelSource host{name_, path_.string(), "the host part of " + name_, {}, "host"};
  // Names below the include directories are this project's own; others are whole paths.
  for (const SourceFile& source :
       source_closure(path_, {compiler.config().kernel_root, compiler.config().include_root}))
    if (fs::path(source.name).is_absolute()) require_trusted(source.name, kAdvice);

  const CacheEntry entry = compiler.compile(host, "generic");  // runs on every CPU
  const std::string library = entry.path(entry.report.at("artifact")).string();
  void* loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // and stays: its tensors may be filled by its code
  if (!loaded) fail("the host part of {} does not load: {}", path_.string(), dlerror());
  auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(loaded, symbol));
    if (!function)
      fail(
          "{} has no HYPERMLA_KERNEL_FILE(describe, reference) outside of its device part; add it "
          "(docs/kernel-files.md)",
          path_.string());
  };
  find(describe_, "hypermla_describe");
  find(reference_, "hypermla_reference");
}

FileProblem FileLibrary::describe(const std::map<std::string, std::int64_t>& given, bool timed, int processors) const {
  Recorder recorder{given, timed, processors, {}, {}};
  const KernelFileCalls calls = calls_of(recorder);
  const char* thrown = describe_(&calls);
  if (recorder.error.empty() && thrown) recorder.error = std::string("describe() threw: ") + thrown;
  recorder.keep([&] { recorder.finish(); });
  if (!recorder.error.empty()) fail("{}: {}", path_.filename().string(), recorder.error);
  return std::move(recorder.problem);
}

KernelSource FileLibrary::source(const FileProblem& problem) const {
  KernelSource source{name_, path_.string(), problem.instance, {}, problem.language};
  for (const FileArgument& argument : problem.arguments)
    source.arguments.push_back(argument.box_rows > 0    ? int(sizeof(TensorMap))
                               : argument.bytes.empty() ? int(sizeof(void*))
                                                        : int(argument.bytes.size()));
  return source;
}

void FileLibrary::reference(const KernelFileRow& row) const {
  if (const char* thrown = reference_(&row))
    fail("{}: reference() threw at row {}: {}", path_.filename().string(), row.row, thrown);
}

FileRun::FileRun(const FileLibrary& library, FileProblem problem, std::shared_ptr<Device> device, Compiler& compiler,
                 std::uint64_t seed)
    : library_(library), problem_(std::move(problem)), device_(std::move(device)), seed_(seed) {
  double bytes = 0;
  for (const FileTensor& tensor : problem_.tensors) bytes += double(tensor.bytes()) + 2 * kGuardBytes;
  if (!device_->is_gpu()) bytes *= 2.4;  // what the check reads lies beside them; as measured
  if (!(bytes < 0.95 * double(device_->info().memory_bytes)))
    fail("the tensors of {} need {:.1f} GB, but this device has {:.1f} GB; choose smaller sizes", library.name(),
         bytes * 1e-9, device_->info().memory_bytes * 1e-9);
  entry_ = compiler.compile(library.source(problem_), device_->info().arch);
  function_ = load(*device_, entry_, problem_.shape);
  for (const FileTensor& tensor : problem_.tensors) buffers_.emplace_back(device_, tensor.bytes() + 2 * kGuardBytes);
  fill(seed);
  pack();
}

void FileRun::fill(std::uint64_t seed) {
  // Standard normal numbers with a prime period; every tensor starts somewhere else in it.
  constexpr std::int64_t kPeriod = 1000003;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(kPeriod);
  for (float& number : numbers) number = normal(random);
  host_.resize(problem_.tensors.size());
  for (std::size_t i = 0; i < problem_.tensors.size(); ++i) {
    const FileTensor& tensor = problem_.tensors[i];
    device_->fill(buffers_[i].data(), tensor.role == Role::input ? kPoison : kGuard, buffers_[i].bytes());
    if (tensor.role != Role::input) continue;
    const std::int64_t count = tensor.elements(), first = std::int64_t(random() % kPeriod);
    host_[i].resize(tensor.bytes());
    in_parallel([&](unsigned thread, unsigned threads) {
      for (std::int64_t e = count * thread / threads; e < count * (thread + 1) / threads; ++e) {
        const float number = numbers[(first + e) % kPeriod];
        store(host_[i].data(), e, tensor.dtype, tensor.fill ? tensor.fill(e, number) : number);
      }
    });
    device_->copy_to_device(static_cast<char*>(buffers_[i].data()) + kGuardBytes, host_[i].data(), host_[i].size());
  }
}

void FileRun::pack() {
  for (const FileArgument& argument : problem_.arguments) {
    auto keep = [&](const auto& value) { packed_.emplace_back(reinterpret_cast<const char*>(&value), sizeof value); };
    if (argument.tensor < 0) {
      packed_.push_back(argument.bytes);
      continue;
    }
    void* data = static_cast<char*>(buffers_[argument.tensor].data()) + kGuardBytes;
    const FileTensor& tensor = problem_.tensors[argument.tensor];
    if (argument.box_rows > 0)
      keep(make_matrix_map(tensor.dtype, data, tensor.shape[0], int(tensor.shape[1]), 1, argument.box_rows,
                           argument.box_groups));
    else
      keep(data);
  }
  for (std::string& bytes : packed_) pointers_.push_back(bytes.data());
}

std::string FileRun::damage() const {
  std::string bytes;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const FileTensor& tensor = problem_.tensors[i];
    const bool input = tensor.role == Role::input;
    for (const std::size_t at : {std::size_t{0}, kGuardBytes + tensor.bytes()}) {
      bytes.resize(kGuardBytes);
      device_->copy_to_host(bytes.data(), static_cast<char*>(buffers_[i].data()) + at, kGuardBytes);
      const std::size_t wrong = bytes.find_first_not_of(char(input ? kPoison : kGuard));
      if (wrong == std::string::npos) continue;
      const std::size_t distance =
          at == 0 ? kGuardBytes - bytes.find_last_not_of(char(input ? kPoison : kGuard)) : wrong;
      return fmt::format("the kernel wrote {} {}, {} bytes {} it; let every store be predicated by the bounds",
                         at == 0 ? "before" : "behind", tensor.name, distance, at == 0 ? "before" : "behind");
    }
    if (!input) continue;
    bytes.resize(tensor.bytes());
    device_->copy_to_host(bytes.data(), static_cast<char*>(buffers_[i].data()) + kGuardBytes, bytes.size());
    if (bytes != host_[i])
      return fmt::format("the kernel changed its input {}; let it write to outputs only", tensor.name);
  }
  return "";
}

namespace {

// Where each output's rows lie, as the host has them.
struct HostOutput {
  const FileTensor* tensor;
  std::string bytes;
  std::int64_t width;  // elements of a row
  FileOutputError error;
  std::pair<double, double> worst = {-1, 0};  // difference over what is allowed; the difference, where nothing is
  double value(std::int64_t i) const { return Values(bytes.data(), tensor->dtype)[i]; }
};

// The rows to compare, the most telling first: those with a NaN, the first, the last, then random ones.
std::vector<std::int64_t> order_of_rows(const std::vector<HostOutput>& outputs, std::int64_t rows, std::uint64_t seed) {
  constexpr std::size_t kMostWithNaN = 8;
  std::vector<std::int64_t> order;
  for (const HostOutput& output : outputs)
    for (std::int64_t i = 0; i < rows * output.width && order.size() < kMostWithNaN; ++i)
      if (std::isnan(output.value(i))) {
        order.push_back(i / output.width);
        i = (i / output.width + 1) * output.width - 1;
      }
  order.insert(order.end(), {0, rows - 1});
  std::vector<std::int64_t> rest(static_cast<std::size_t>(rows));
  for (std::int64_t i = 0; i < rows; ++i) rest[static_cast<std::size_t>(i)] = i;
  std::shuffle(rest.begin(), rest.end(), std::mt19937_64(seed));
  std::vector<bool> seen(static_cast<std::size_t>(rows));
  std::vector<std::int64_t> all;
  order.insert(order.end(), rest.begin(), rest.end());
  for (const std::int64_t row : order)
    if (!seen[static_cast<std::size_t>(row)]) {
      seen[static_cast<std::size_t>(row)] = true;
      all.push_back(row);
    }
  return all;
}

void compare_row(HostOutput& output, std::int64_t row, const double* expected, double rtol, double atol) {
  for (std::int64_t j = 0; j < output.width; ++j) {
    const std::int64_t i = row * output.width + j;
    const double got = output.value(i), allowed = atol + rtol * std::fabs(expected[j]);
    // An infinity must be the same one; NaN never passes, not even where NaN is expected.
    const double difference = got == expected[j] ? 0 : std::fabs(got - expected[j]);
    const bool right = difference <= allowed && std::isfinite(difference);
    double part = difference == 0 ? 0 : difference / allowed;
    if (std::isnan(part) || (!right && !(part > 1))) part = HUGE_VAL;
    ++output.error.compared;
    output.error.wrong += !right;
    const std::pair badness(part, std::isnan(difference) ? HUGE_VAL : difference);
    if (badness > output.worst) {
      output.worst = badness;
      output.error.got = std::isnan(got) ? std::nan("") : got;  // without its sign
      output.error.expected = expected[j];
      output.error.allowed = allowed;
      output.error.position.assign(output.tensor->shape.size(), 0);
      std::int64_t rest = i;
      for (std::size_t axis = output.tensor->shape.size(); axis-- > 0; rest /= output.tensor->shape[axis])
        output.error.position[axis] = rest % output.tensor->shape[axis];
    }
  }
}

}  // namespace

FileCheck FileRun::check(double rtol, double atol, double seconds) {
  for (std::size_t i = 0; i < buffers_.size(); ++i)
    if (problem_.tensors[i].role == Role::output)
      device_->fill(static_cast<char*>(buffers_[i].data()) + kGuardBytes,
                    problem_.tensors[i].dtype == DType::int32 ? kPoisonOfIntegers : kPoison,
                    problem_.tensors[i].bytes());
  run(device_->stream());
  device_->synchronize();

  FileCheck result;
  result.rows = problem_.rows();
  std::vector<HostOutput> outputs;
  std::vector<const void*> inputs;
  std::vector<int> dtypes;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const FileTensor& tensor = problem_.tensors[i];
    if (tensor.role == Role::input) {
      inputs.push_back(host_[i].data());
      dtypes.push_back(int(tensor.dtype));
      continue;
    }
    HostOutput output{&tensor, std::string(tensor.bytes(), '\0'), tensor.elements() / result.rows, {}};
    output.error.output = tensor.name;
    device_->copy_to_host(output.bytes.data(), static_cast<char*>(buffers_[i].data()) + kGuardBytes, tensor.bytes());
    outputs.push_back(std::move(output));
  }

  const std::vector<std::int64_t> order = order_of_rows(outputs, result.rows, seed_);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  constexpr std::size_t kLeastRows = 4;
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  in_parallel([&](unsigned, unsigned) {
    std::vector<std::vector<double>> expected;
    std::vector<double*> pointers;
    for (const HostOutput& output : outputs) expected.emplace_back(output.width);
    for (auto& values : expected) pointers.push_back(values.data());
    for (;;) {
      const std::size_t at = next++;
      if (at >= order.size() || (at >= kLeastRows && std::chrono::steady_clock::now() > end)) return;
      for (auto& values : expected) std::fill(values.begin(), values.end(), std::nan(""));  // what it forgets, fails
      library_.reference({order[at], problem_.values.data(), inputs.data(), dtypes.data(), pointers.data(),
                          int(problem_.values.size()), int(inputs.size()), int(pointers.size())});
      std::lock_guard lock(mutex);
      ++result.rows_compared;
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        const double usual = usual_tolerance(outputs[i].tensor->dtype);
        const auto chosen = [&](double asked, double of_file) {
          return asked >= 0 ? asked : of_file >= 0 ? of_file : usual;
        };
        compare_row(outputs[i], order[at], expected[i].data(), chosen(rtol, problem_.rtol),
                    chosen(atol, problem_.atol));
      }
    }
  });

  result.failure = damage();
  for (HostOutput& output : outputs) {
    const FileOutputError& error = output.error;
    if (error.wrong && result.failure.empty())
      result.failure = fmt::format(
          "{} differs from the reference at [{}]: got {:.6g}, expected {:.6g}, allowed to differ by {:.3g}; {} of {} "
          "elements compared are wrong",
          error.output, fmt::join(error.position, ", "), error.got, error.expected, error.allowed, error.wrong,
          error.compared);
    result.outputs.push_back(error);
  }
  return result;
}

}  // namespace hypermla
