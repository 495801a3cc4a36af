// Where kernels run: one NVIDIA GPU through the CUDA driver API (loaded at run time, nothing links CUDA), or this CPU.
// Layers above know only this interface, so that every command works on both.
//
// Goals: memory, launches, replayable recordings, event timing, a cold cache on demand.
// Non-goals: multi-GPU, managed memory, changing clocks or power.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace hypermla {

struct DeviceInfo {
  std::string name;    // "NVIDIA H200", "AMD EPYC"
  std::string arch;    // what kernels are compiled for: "sm_90", "x86-64-v4"
  int processors = 0;  // SMs or cores
  std::size_t memory_bytes = 0;
  std::size_t cache_bytes = 0;  // L2 of a GPU, last level of a CPU
  std::string driver;           // "13.0 (580.159.04)"; empty on a CPU
};

struct Grid {
  unsigned x = 1, y = 1, z = 1;
  double blocks() const { return double(x) * y * z; }
};

// A stream is the driver's own handle (CUstream), so that callers pass theirs; null is the device's default. CPU work
// is done when the call returns.
using StreamHandle = void*;
using Work = std::function<void(StreamHandle)>;

// What a launch needs beyond the grid. The default is that of kernels that choose their threads and shared memory
// themselves (CUDA Tile, and every kernel on a CPU).
struct LaunchShape {
  unsigned threads = 1;
  unsigned shared_bytes = 0;  // dynamic shared memory of a block
  unsigned cluster = 1;       // consecutive blocks along x that reach each other's shared memory; divides grid.x
  // Programmatic launch: the kernel may start while the one before it in the stream still runs, and waits for it
  // itself.
  bool overlaps_previous = false;
  bool operator==(const LaunchShape&) const = default;
};

// One loaded kernel. `arguments[i]` points to the i-th kernel argument.
class Function {
 public:
  virtual ~Function() = default;
  virtual void launch(Grid grid, void** arguments, StreamHandle stream) = 0;
};

// Work that is captured once and replayed without the host: a CUDA graph; on a CPU, the work itself.
class Recording {
 public:
  virtual ~Recording() = default;
  virtual void replay(StreamHandle stream) = 0;
};

// Streams for concurrent work, forked from a caller's stream and joined to it again by events. The host does not wait,
// and a capture of the caller's stream captures them, too.
class StreamGroup {
 public:
  virtual ~StreamGroup() = default;
  virtual StreamHandle stream(std::size_t i) const = 0;
  virtual int processors(std::size_t i) const = 0;  // that its work runs on
  // `count` streams to be forked from the i-th, on its SMs. They do not outlive the device.
  virtual std::unique_ptr<StreamGroup> inside(std::size_t i, std::size_t count) const = 0;
  virtual void fork(StreamHandle from) = 0;  // they wait for all that `from` was given so far
  virtual void join(StreamHandle to) = 0;    // `to` waits for all that they were given so far
};

// What the board reports about itself at this moment (read only).
struct PowerSample {
  double sm_mhz = 0, watts = 0, celsius = 0;
};

class Device : public std::enable_shared_from_this<Device> {
 public:
  virtual ~Device() = default;

  const DeviceInfo& info() const { return info_; }
  virtual bool is_gpu() const = 0;

  virtual void* allocate(std::size_t bytes) = 0;  // 256-byte aligned; throws Error naming the size that did not fit
  virtual void release(void* data) noexcept = 0;
  virtual void copy_to_device(void* to, const void* from, std::size_t bytes) = 0;
  virtual void copy_to_host(void* to, const void* from, std::size_t bytes) = 0;  // from any thread
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
  virtual void fill(void* data, unsigned char byte, std::size_t bytes) = 0;
  // Enqueues a write of `word` to each of `count` places of 4 bytes.
  virtual void fill_words(void* data, std::uint32_t word, std::size_t count, StreamHandle stream) = 0;

  virtual std::unique_ptr<Function> load(const std::filesystem::path& artifact, const std::string& function,
                                         const LaunchShape& shape = {}) = 0;
  // The calling thread's, for what asks the driver beside this class, whose calls do so by themselves and leave the
  // thread the one that it had.
  virtual void make_current() {}
  virtual StreamHandle stream() = 0;  // one stream of the device's own, for tuning, checks and profiles
  virtual void synchronize() = 0;
  // `count` streams over the whole device; or, with `partition`, each on SMs of its own, at least as many as asked. One
  // of the numbers is rounded up to the unit of the hardware (8 on Hopper). A GPU is divided in two; throws Error when
  // these numbers are not possible. On a CPU a partition has no effect, since work is done when its call returns.
  virtual std::unique_ptr<StreamGroup> streams(std::size_t count, const std::vector<int>& partition = {}) = 0;

  virtual std::unique_ptr<Recording> record(const Work& work) = 0;
  // Seconds, by events, from the start to the end of what `work` enqueues on the device's own stream.
  virtual double time(const Work& work) = 0;
  // Enqueues a write of more than the cache holds, so that what follows reads from memory.
  virtual void flush_cache(StreamHandle stream) = 0;
  virtual std::optional<PowerSample> power() = 0;

 protected:
  DeviceInfo info_;
};

std::shared_ptr<Device> make_cpu_device(int threads = 0);   // 0: all cores this process may use
std::shared_ptr<Device> make_cuda_device(int ordinal = 0);  // throws Error saying why there is none
// Null when a CUDA device can be had; otherwise the reason, as a sentence.
std::optional<std::string> cuda_unavailable();
// "cpu", "cuda", "cuda:1", or "auto": the first GPU, else the CPU.
std::shared_ptr<Device> make_device(const std::string& name);

// Device memory that is freed with its owner.
class Buffer {
 public:
  Buffer() = default;
  Buffer(std::shared_ptr<Device> device, std::size_t bytes)
      : device_(std::move(device)), bytes_(bytes), data_(device_->allocate(bytes)) {}
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(bytes_, other.bytes_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Buffer() {
    if (data_) device_->release(data_);
  }
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Device> device_;
  std::size_t bytes_ = 0;
  void* data_ = nullptr;
};

}  // namespace hypermla
