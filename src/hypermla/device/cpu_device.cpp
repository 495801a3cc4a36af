#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "hypermla/base/error.h"
#include "hypermla/device/device.h"
#include "hypermla/device/pool.h"

namespace hypermla {
namespace {

// The function that a compiled kernel exports (kernels/cutile/tile_host/entry.h). It returns null or an error message.
using Entry = const char* (*)(void** arguments, const unsigned* grid, std::uint64_t block);

class CpuFunction : public Function {
 public:
  CpuFunction(Entry entry, std::shared_ptr<Pool> pool, int threads)
      : entry_(entry), pool_(std::move(pool)), threads_(threads) {}

  void launch(Grid grid, void** arguments, StreamHandle) override {
    const unsigned extents[] = {grid.x, grid.y, grid.z};
    const std::string error = pool_->run(std::uint64_t{grid.x} * grid.y * grid.z, threads_,
                                         [&](std::uint64_t block) { return entry_(arguments, extents, block); });
    if (!error.empty()) fail("{}", error);
  }

 private:
  Entry entry_;
  std::shared_ptr<Pool> pool_;
  int threads_;
};

class CpuRecording : public Recording {
 public:
  explicit CpuRecording(Work work) : work_(std::move(work)) {}
  void replay(StreamHandle stream) override { work_(stream); }

 private:
  Work work_;
};

class CpuStreams : public StreamGroup {
 public:
  explicit CpuStreams(int threads) : threads_(threads) {}
  StreamHandle stream(std::size_t) const override { return nullptr; }
  int processors(std::size_t) const override { return threads_; }
  std::unique_ptr<StreamGroup> inside(std::size_t, std::size_t) const override {
    return std::make_unique<CpuStreams>(threads_);
  }
  void fork(StreamHandle) override {}
  void join(StreamHandle) override {}

 private:
  int threads_;
};

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
  return "CPU";
}

// The cache that one core uses. sysconf() and cpuid count those of the whole package, also of other virtual machines.
std::size_t last_level_cache_bytes() {
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
  std::size_t kilobytes = 0;
  return file >> kilobytes ? kilobytes << 10 : std::size_t{32} << 20;
}

// The instructions that compiled kernels may use. A level, not "native": the name is part of the cache key and must
// mean the same on every machine.
std::string cpu_arch() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512cd");
  if (v4 && __builtin_cpu_supports("avx512bf16")) return "x86-64-v4+avx512bf16";
  return v4 ? "x86-64-v4" : v3 ? "x86-64-v3" : "x86-64";
#elif defined(__aarch64__)
  return "armv8-a";
#else
  return "generic";
#endif
}

class CpuDevice : public Device {
 public:
  explicit CpuDevice(int threads) {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    const int cores = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
    threads_ = threads > 0 ? threads : cores;
    info_.name = cpu_name();
    info_.arch = cpu_arch();
    info_.processors = threads_;
    info_.memory_bytes = std::size_t(sysconf(_SC_PHYS_PAGES)) * std::size_t(sysconf(_SC_PAGE_SIZE));
    info_.cache_bytes = last_level_cache_bytes();
  }

  bool is_gpu() const override { return false; }

  void* allocate(std::size_t bytes) override {
    const std::size_t rounded = (std::max<std::size_t>(bytes, 1) + 255) / 256 * 256;
    void* data = rounded < info_.memory_bytes ? std::aligned_alloc(256, rounded) : nullptr;
    if (!data)
      fail("{:.2f} GB of memory do not fit: this machine has {:.2f} GB; choose a smaller problem or capacity",
           bytes / 1e9, info_.memory_bytes / 1e9);
    return data;
  }
  void release(void* data) noexcept override { std::free(data); }
  void copy_to_device(void* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }
  void copy_to_host(void* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }
  void copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes) std::memcpy(to, from, bytes);  // else either may be null
  }
  void fill(void* data, unsigned char byte, std::size_t bytes) override { std::memset(data, byte, bytes); }
  void fill_words(void* data, std::uint32_t word, std::size_t count, StreamHandle) override {
    std::fill_n(static_cast<std::uint32_t*>(data), count, word);
  }

  std::unique_ptr<Function> load(const std::filesystem::path& artifact, const std::string& function,
                                 const LaunchShape&) override {
    void* library = dlopen(artifact.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) fail("the compiled kernel {} does not load: {}", artifact.string(), dlerror());
    auto entry = reinterpret_cast<Entry>(dlsym(library, function.c_str()));
    if (!entry) fail("the compiled kernel {} has no {}; delete its cache entry", artifact.string(), function);
    // The library stays mapped: its code frees the memory of tiles that the pool's threads keep.
    return std::make_unique<CpuFunction>(entry, pool_, threads_);
  }

  StreamHandle stream() override { return nullptr; }
  void synchronize() override {}
  std::unique_ptr<StreamGroup> streams(std::size_t, const std::vector<int>&) override {
    return std::make_unique<CpuStreams>(threads_);
  }
  std::unique_ptr<Recording> record(const Work& work) override { return std::make_unique<CpuRecording>(work); }
  double time(const Work& work) override {
    const auto begin = std::chrono::steady_clock::now();
    work(nullptr);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  void flush_cache(StreamHandle) override {
    flush_.resize(2 * info_.cache_bytes);
    std::memset(flush_.data(), ++flushes_, flush_.size());
  }
  std::optional<PowerSample> power() override { return std::nullopt; }

 private:
  int threads_ = 1;
  std::shared_ptr<Pool> pool_ = std::make_shared<Pool>();
  int flushes_ = 0;
  std::vector<unsigned char> flush_;
};

}  // namespace

std::shared_ptr<Device> make_cpu_device(int threads) { return std::make_shared<CpuDevice>(threads); }

}  // namespace hypermla
