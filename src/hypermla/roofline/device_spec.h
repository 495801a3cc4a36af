// What a device can do at most, for roofline predictions: conf/devices.json, and over it a file with what
// `hypermla device --measure` found on the user's own devices.
//
// One entry, by the name that the driver reports. Every key is optional:
//   peak_{bfloat16,float16,float32}_float32_tflops  multiply-accumulate rate on that element type, fp32 accumulation
//   peak_dram_bw_GBps                               memory bandwidth, 10^9 bytes per second
//   sm_count                                        SMs; cores of a CPU
//   arch                                            what kernels are compiled for: "sm_90"; a CPU has none
//   note                                            where the figures come from
//   measured                                        an object: see kMeasuredKeys
// A device without a peak takes the measured figure in its place: matmul_burst_tflops or, without tensor cores,
// fma_gflops; read_GBps.
#pragma once

#include <array>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "hypermla/base/fields.h"
#include "hypermla/dtype.h"

namespace hypermla {

// The keys of "measured". A burst is a few milliseconds after idle; sustained is the rate under the power cap.
// fma_gflops is fp32 on the vector units, all cores or SMs. power_share is a in x + a y <= 1, x and y the tensor work
// and the reads that go on together, as fractions of matmul_sustained_tflops and read_GBps alone. launch_us is the
// least cost of one more kernel in a recording. All are numbers, but date (YYYY-MM-DD), note and reach.
//
// reach says what kernels themselves reach there, by path: {"latent": {"tensor": 0.9}, "decompressed": {"memory": 0.7},
// "hybrid": {"overlap": 1.2}}. A number is a part of what the figures of the path's kernels say (Figures in
// kernel_time.h, of an H200); 1 where it is left out. tensor and memory are of the work of one path, overlap is of two
// paths at once.
inline constexpr std::array<std::string_view, 10> kMeasuredKeys = {"matmul_burst_tflops",
                                                                   "matmul_sustained_tflops",
                                                                   "read_GBps",
                                                                   "copy_GBps",
                                                                   "fma_gflops",
                                                                   "power_share",
                                                                   "launch_us",
                                                                   "reach",
                                                                   "date",
                                                                   "note"};

struct DeviceSpec {
  std::string name;
  double bfloat16_tflops = 0;  // 0: not known
  double float16_tflops = 0;
  double float32_tflops = 0;
  double peak_gbps = 0;
  int sm_count = 0;
  std::string arch;  // empty: not known, or a CPU
  std::string note;
  Json measured = Json::object();

  // A figure of kMeasuredKeys that is a number; `absent` if it was not measured.
  double measured_or(std::string_view key, double absent) const { return measured.value(std::string(key), absent); }
  // TFLOP/s with fp32 accumulation. Throws Error when neither the file nor a measurement has it.
  double peak_tflops(DType dtype) const;
};

// One entry of the file. Throws Error naming the device and the key that is unknown or has the wrong type.
DeviceSpec device_spec_from_json(std::string_view name, const Json& entry);

class DeviceTable {
 public:
  // `overlay` has the same format; it may be empty or not exist. A key in it replaces the same key of the same device,
  // "measured" as a whole, so that figures of two dates do not mix. Throws Error naming the file when `devices` cannot
  // be read or holds what it must not. An overlay is generated, so a bad one is left out, and ignored() says why.
  static DeviceTable load(const std::filesystem::path& devices, const std::filesystem::path& overlay = {});

  const std::string& ignored() const { return ignored_; }  // empty: nothing

  std::vector<std::string> names() const;
  bool contains(const std::string& name) const { return specs_.count(name) != 0; }
  // Throws Error naming the nearest entry. The entry "CPU" is used for a CPU without measured figures.
  const DeviceSpec& find(const std::string& name) const;
  // Of the entries of that architecture the one with the fastest memory, else that of a CPU: for compilation ahead of
  // time, and for devices without an entry.
  const DeviceSpec& of_arch(const std::string& arch) const;

 private:
  std::map<std::string, DeviceSpec> specs_;
  std::string ignored_;
};

// Sets the "measured" object of one device in the overlay file and keeps the rest of the file; makes the file and its
// directory when there is none. A file that cannot be used is put aside as
// <overlay>.unusable. Throws Error for a key outside kMeasuredKeys.
void save_measured(const std::filesystem::path& overlay, const std::string& name, const Json& measured);

}  // namespace hypermla
