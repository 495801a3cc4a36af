// HyperMLA's C++ interface: plan a kernel for a problem, bind the caller's tensors, tune once, run on the caller's
// stream.
//
//   hypermla::DeviceHandle device;  // the first GPU, else the CPU
//   hypermla::Kernel kernel("flash_attention", {{"b", "1"}, {"s", "16"}, {"t", "1024"}}, device);
//   for (const hypermla::TensorInfo& info : kernel.tensors()) kernel.bind(info.name, pointer_for(info));
//   kernel.tune();
//   kernel.run(stream);
//
// run() neither allocates, nor synchronises, nor reads back, and may be captured in a CUDA graph; replay it only while
// the Kernel lives, which owns the workspace. One Kernel is used by one thread at a time. Every function throws
// hypermla::Error: one sentence that says what to do next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hypermla/check.h"
#include "hypermla/dtype.h"
#include "hypermla/error.h"
#include "hypermla/profile.h"

namespace hypermla {

class Device;

// What an object of the library owns. One that was moved from throws Error at every use until it is assigned to.
template <class State>
class Owned {
 public:
  Owned(std::unique_ptr<State> state) : state_(std::move(state)) {}
  State* operator->() const {
    if (!state_) throw Error("this object was moved from; use the one that it was moved to");
    return state_.get();
  }

 private:
  std::unique_ptr<State> state_;
};

// A CUDA device, or this CPU. Copies share it. A thread's current device of CUDA stays what it is; one that has none
// gets this.
class HYPERMLA_API DeviceHandle {
 public:
  // "cpu", "cuda", "cuda:1", or "auto": the first GPU, else the CPU.
  explicit DeviceHandle(const std::string& name = "auto");
  DeviceHandle(const DeviceHandle&) = default;  // a move copies, too, so that no handle is empty
  DeviceHandle& operator=(const DeviceHandle&) = default;
  std::string name() const;  // "NVIDIA H200"
  bool is_gpu() const;
  void synchronize() const;

 private:
  friend class Kernel;
  friend class MlaCacheOps;
  friend class MlaDecode;
  friend class MlaPrefill;
  friend class OwnInputs;
  std::string said_;
  std::shared_ptr<Device> device_;
};

// A tensor that a kernel reads or writes: dense and row-major, in the device's memory, 16-byte aligned.
struct TensorInfo {
  std::string name;                 // "q"
  std::vector<std::int64_t> shape;  // {b, h, s, d}
  DType dtype;
  bool is_input;  // otherwise the kernel writes it: an output or, where is_workspace, scratch
  bool is_workspace;
  std::size_t bytes;
};

struct TuneOptions {
  int max_iterations = 0;  // limits the candidates per kernel; 0: all
  bool retune = false;     // forget what was measured, and which tilings were rejected, before
  // Called several times a second, in the thread that tunes; true ends tune() with an Error. What was measured stays
  // remembered.
  std::function<bool()> stop = {};
};

struct ProfileOptions {
  std::string out_dir = {};  // a new or empty directory; "": out/profiles/<mode>/<kernel>/... below the working one
  std::string label = {};    // a word of yours, kept in the profile
  int bench_runs = 20;       // repetitions of a measurement
};

class HYPERMLA_API Kernel {
 public:
  // `name` and `version` as on the command line: "flash_attention", "v1". `problem` sets fields by name; the others
  // keep their defaults (`hypermla kernel <name> --help` lists them). `language` pins "cute" or "cutile"; empty: the
  // faster one for the problem that runs on the device. A hybrid's n that is left open is the one that
  // `hypermla kernel` measured on this device, else what the model takes; the tensors follow from it, so tune() keeps
  // it.
  Kernel(const std::string& name, const std::map<std::string, std::string>& problem,
         const DeviceHandle& device = DeviceHandle(), const std::string& version = "",
         const std::string& language = "");
  ~Kernel();
  Kernel(Kernel&&) noexcept;
  Kernel& operator=(Kernel&&) noexcept;

  // The names of all kernels, "flash_attention", "flash_attention_v1", ...: each once, also one of several languages.
  static std::vector<std::string> list();

  const std::vector<TensorInfo>& tensors() const;
  // Gives a tensor its memory, which the caller owns. All must be bound before tune() or run(); bind again to change
  // one. What the kernel writes must share memory with no other tensor: run() refuses that, for a kernel reads some of
  // its inputs after it has begun to write.
  void bind(const std::string& tensor, void* data);

  // Chooses the tilings for this device: remembered ones, else measured now on the bound tensors (whose outputs it
  // writes). Without it, run() uses the defaults. Returns a sentence for every kernel of which tilings were left out,
  // because they do not compile or run, or could not be compiled now.
  std::vector<std::string> tune(const TuneOptions& options = {});
  // Compiles and loads, which the first run() otherwise does.
  void prepare();
  // Enqueues the kernel on a CUstream (or cudaStream_t) of the caller's; null is the default stream. On the CPU it
  // returns when the work is done.
  //
  // Kernels follow the int32 inputs: lengths are from 0 to the tokens that their tensors hold, `prefix` is from 0 to
  // prefixes - 1, and block_table names pages of the pool for as many tokens as a request has. On the CPU run(), tune()
  // and profile() throw Error for other lengths and prefixes. On a GPU flash_mla, alone and in a hybrid, cuts `lengths`
  // to these limits, and check() says so. Nothing looks at the others: beyond the limits a kernel reads what belongs to
  // other requests or to none. MlaDecode (mla_decode.h) looks on both.
  void run(void* stream = nullptr);
  // Waits for the device, and throws Error when the last run() over the bound tensors, or the last replay of its
  // recording, was given `lengths` beyond these limits and cut them. On a CPU, where run() throws, it does nothing.
  void check() const;

  // Measures the kernel on the bound tensors, whose outputs it writes, sets that against the roofline and writes
  // report.md, profile.json and the files of the mode: "annotation" (counters of the hardware), "event" (times only),
  // "ncu" (Nsight Compute) or "nsys" (the timeline); docs/profiling.md describes them. A profiler that is absent,
  // denied or fails leaves the times and says why in `missing`. ncu and nsys watch a second run, of random inputs, in
  // the program `hypermla`.
  ProfileSummary profile(const std::string& mode = "annotation", const ProfileOptions& options = {});

  // Roofline time on a device of conf/devices.json; empty: the kernel's own device. Needs no tensors.
  double predicted_seconds(const std::string& device = "") const;

 private:
  struct State;
  Owned<State> state_;
};

// One version of one kernel, as `hypermla --list` prints it.
struct ListedKernel {
  std::string name;       // "flash_attention_v1": its design and version
  std::string full_name;  // "cutile.mla.flash_attention_v1"
  std::string language;   // "cute" or "cutile"
  std::string version;    // "v0", the base version, "v1", ...
  std::string summary;
  bool draft;  // not verified on a GPU yet
};
HYPERMLA_API std::vector<ListedKernel> list_kernels();

// What the next two functions take beside a kernel and its problem.
struct RunOptions {
  std::string version = {}, language = {};  // as of Kernel
  std::uint64_t seed = 0;                   // of the random inputs; 0 draws a fresh one
  bool tune = false;                        // as Kernel::tune() does; otherwise with the default tilings
  std::function<bool()> stop = {};          // as of TuneOptions
};

// `hypermla kernel <name> --check` in one call: runs the kernel on random inputs in memory of its own and compares with
// the reference.
HYPERMLA_API CheckSummary check_kernel(const std::string& name, const std::map<std::string, std::string>& problem,
                                       const DeviceHandle& device = DeviceHandle(), const RunOptions& options = {});

// Kernel::profile() in one call, on random inputs in memory of its own.
HYPERMLA_API ProfileSummary profile_kernel(const std::string& name, const std::map<std::string, std::string>& problem,
                                           const std::string& mode = "annotation",
                                           const DeviceHandle& device = DeviceHandle(), const RunOptions& options = {},
                                           const ProfileOptions& profile = {});

struct VerifyOptions {
  std::string version = {}, language = {};  // as of Kernel
  std::string record = {};                  // the file that receives the result, as results/verified.json; "": none
  std::function<bool()> stop = {};          // called before every case; true ends the work with an Error
};

// `hypermla verify` in one call: all correctness cases of one version on a device or, where `name` is empty, of all
// that run there. Takes seconds for a kernel on a GPU, and minutes on a CPU. Of several, a version that cannot be
// compiled or run has failed, and is not recorded; of one this throws Error.
HYPERMLA_API std::vector<VerifySummary> verify_kernels(const std::string& name = "",
                                                       const DeviceHandle& device = DeviceHandle(),
                                                       const VerifyOptions& options = {});

// One kernel that can do a piece of attention, as `hypermla choose` ranks it.
struct Choice {
  std::string path;    // "latent", "decompressed", "hybrid" or "shared prefix"
  std::string kernel;  // "cutile.mla.flash_mla", for Kernel; the latent path runs output_decompression behind it
  int n;               // decompressed tokens of a request
  double burst_seconds, sustained_seconds;  // predicted, with the output decompression
  std::string limit;                        // "tensor", "memory", "power" or "launches"
  bool draft;                               // not verified on a GPU yet
};

// All kernels that take a problem on a device of conf/devices.json, fastest first; empty: the present device. `problem`
// sets fields by name: b, s, t, h, d, p, k, dtype, causal, prefix, prefixes, private (`hypermla choose --help`).
// `language` leaves only the kernels in "cute" or "cutile".
HYPERMLA_API std::vector<Choice> choose(const std::map<std::string, std::string>& problem,
                                        const std::string& device = "", const std::string& language = "");

}  // namespace hypermla
