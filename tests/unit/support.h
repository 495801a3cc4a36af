// What several unit tests need: a directory of their own, memory of a device, fixtures of GPUs, and a device whose
// clock they write.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/device/device.h"

namespace hypermla::testing_support {

// The sentence that `action` throws; empty when it throws none.
inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The larger of both differences; infinite once one is NaN, whichever it is and whatever follows.
inline double worse(double worst, double difference) {
  return std::isnan(difference) ? HUGE_VAL : std::max(worst, difference);
}

// The checkout that this file was compiled in.
inline std::filesystem::path checkout() {
  return std::filesystem::absolute(__FILE__).parent_path().parent_path().parent_path();
}

// A fresh directory that is removed with its owner.
class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "hypermla-test-XXXXXX").string();
    if (!::mkdtemp(name.data())) fail("no temporary directory can be made at {}; set TMPDIR", name);
    path_ = std::filesystem::canonical(name);
  }
  TempDir(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

  // Writes a file with its directories.
  std::filesystem::path write(const std::string& name, const std::string& text) const {
    make_directories((path_ / name).parent_path());
    write_file_atomic(path_ / name, text);
    return path_ / name;
  }
  std::filesystem::path write_program(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = write(name, text);
    ::chmod(path.c_str(), 0755);
    return path;
  }

 private:
  std::filesystem::path path_;
};

// Vectors in a device's memory.
struct DeviceMemory {
  std::shared_ptr<Device> device_;

  template <class T>
  void copy(const Buffer& to, const std::vector<T>& values) const {
    device_->copy_to_device(to.data(), values.data(), values.size() * sizeof(T));
  }
  template <class T>
  Buffer copy_of(const std::vector<T>& values) const {
    Buffer buffer(device_, values.size() * sizeof(T));
    copy(buffer, values);
    return buffer;
  }
  template <class T>
  std::vector<T> back(const Buffer& buffer) const {
    std::vector<T> values(buffer.bytes() / sizeof(T));
    device_->copy_to_host(values.data(), buffer.data(), buffer.bytes());
    return values;
  }
};

// Tests on a GPU, which are skipped where there is none.
class OnAGpu : public testing::Test, protected DeviceMemory {
 protected:
  void SetUp() override {
    if (const auto why = cuda_unavailable()) GTEST_SKIP() << *why;
    device_ = make_cuda_device();
  }
};
class OnHopper : public OnAGpu {
 protected:
  void SetUp() override {
    OnAGpu::SetUp();
    if (device_ && device_->info().arch != "sm_90") GTEST_SKIP() << "this GPU is " << device_->info().arch;
  }
};

// Memory is the host's, a launch is a function of the test, and time passes only where a launch adds to `now`.
class FakeDevice : public Device {
 public:
  FakeDevice() {
    info_.name = "Fake 1";
    info_.arch = "generic";
    info_.processors = 4;
    info_.memory_bytes = std::size_t{1} << 30;
    info_.cache_bytes = 1 << 20;
  }

  double now = 0;  // seconds
  std::function<void(const std::filesystem::path& artifact, Grid grid, void** arguments)> on_launch =
      [](const std::filesystem::path&, Grid, void**) {};
  std::function<void()> on_flush = [] {};
  std::function<std::optional<PowerSample>()> on_power = [] { return std::nullopt; };
  int loads = 0, records = 0;
  LaunchShape loaded_shape;  // of the last load

  void rename(const std::string& name) { info_.name = name; }
  bool is_gpu() const override { return false; }
  void* allocate(std::size_t bytes) override { return std::aligned_alloc(256, (bytes + 256) / 256 * 256); }
  void release(void* data) noexcept override { std::free(data); }
  void copy_to_device(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void copy_to_host(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void copy(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void fill(void* data, unsigned char byte, std::size_t bytes) override { std::memset(data, byte, bytes); }
  void fill_words(void* data, std::uint32_t word, std::size_t count, StreamHandle) override {
    std::fill_n(static_cast<std::uint32_t*>(data), count, word);
  }

  std::unique_ptr<Function> load(const std::filesystem::path& artifact, const std::string&,
                                 const LaunchShape& shape) override {
    ++loads;
    loaded_shape = shape;
    return std::make_unique<FakeFunction>(*this, artifact);
  }
  StreamHandle stream() override { return this; }
  void synchronize() override {}
  std::unique_ptr<StreamGroup> streams(std::size_t count, const std::vector<int>& partition) override {
    return std::make_unique<FakeStreams>(*this, count, partition);
  }
  // Forks, joins and launches by the streams they are on: "a" is the device's own, then come those of groups.
  bool note_streams = false;
  std::vector<std::string> stream_events;
  std::string stream_name(StreamHandle stream) const {
    for (std::size_t i = 0; i < streams_.size(); ++i)
      if (streams_[i].get() == stream) return std::string(1, char('b' + i));
    return "a";
  }
  std::unique_ptr<Recording> record(const Work& work) override {
    ++records;
    return std::make_unique<FakeRecording>(work);
  }
  double time(const Work& work) override {
    const double begin = now;
    work(stream());
    return now - begin;
  }
  void flush_cache(StreamHandle) override { on_flush(); }
  std::optional<PowerSample> power() override { return on_power(); }

 private:
  struct FakeFunction : Function {
    FakeFunction(FakeDevice& owner, std::filesystem::path from) : device(owner), artifact(std::move(from)) {}
    void launch(Grid grid, void** arguments, StreamHandle stream) override {
      if (device.note_streams) device.stream_events.push_back(device.stream_name(stream) + " runs " + kernel());
      device.on_launch(artifact, grid, arguments);
    }
    std::string kernel() const {
      const std::string entry = artifact.parent_path().filename().string();
      return entry.substr(0, entry.find('-'));
    }
    FakeDevice& device;
    std::filesystem::path artifact;
  };
  struct FakeStreams : StreamGroup {
    FakeStreams(FakeDevice& owner, std::size_t count, std::vector<int> sizes)
        : device(owner), partition(std::move(sizes)) {
      for (std::size_t i = 0; i < count; ++i)
        mine.push_back(device.streams_.emplace_back(std::make_unique<char>()).get());
    }
    StreamHandle stream(std::size_t i) const override { return mine[i]; }
    int processors(std::size_t i) const override { return partition.empty() ? device.info_.processors : partition[i]; }
    std::unique_ptr<StreamGroup> inside(std::size_t i, std::size_t count) const override {
      auto made = std::make_unique<FakeStreams>(device, count,
                                                partition.empty() ? partition : std::vector<int>(count, partition[i]));
      if (device.note_streams)
        for (std::size_t one = 0; one < count; ++one)
          device.stream_events.push_back(device.stream_name(made->stream(one)) + " on the " +
                                         std::to_string(made->processors(one)) + " SMs of " +
                                         device.stream_name(stream(i)));
      return made;
    }
    void fork(StreamHandle from) override {
      if (!device.note_streams) return;
      for (StreamHandle to : mine)
        device.stream_events.push_back(device.stream_name(to) + " waits for " + device.stream_name(from));
    }
    void join(StreamHandle to) override {
      if (!device.note_streams) return;
      for (StreamHandle from : mine)
        device.stream_events.push_back(device.stream_name(to) + " waits for " + device.stream_name(from));
    }
    FakeDevice& device;
    std::vector<int> partition;
    std::vector<StreamHandle> mine;
  };
  struct FakeRecording : Recording {
    explicit FakeRecording(Work recorded) : work(std::move(recorded)) {}
    void replay(StreamHandle stream) override { work(stream); }
    Work work;
  };
  std::vector<std::unique_ptr<char>> streams_;
};

// A C++ compiler for FakeDevice: it "compiles" at once and refuses a source that holds the word REFUSED.
inline std::filesystem::path write_fake_compiler(const TempDir& dir, const std::string& refused) {
  return dir.write_program("fake-c++", R"(#!/bin/sh
[ "$1" = --version ] && { echo "fake compiler 1.0"; exit 0; }
for word; do
  case "$word" in *kernel.cpp) source="$word";; esac
  [ "$last" = -o ] && output="$word"
  last="$word"
done
if grep -q ')" + refused + R"(' "$source"; then echo "kernel.cpp:1:1: error: this tiling is refused" >&2; exit 1; fi
cp "$source" "$output"
)");
}

}  // namespace hypermla::testing_support
