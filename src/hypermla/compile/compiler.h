// From a kernel's source to a loadable artifact, through the cache.
//
// The key is what the artifact depends on: the text of the instance, every file it includes from this project, the
// target, the flags and, for a CPU, the compiler: its path and its version. For a GPU requirements.txt pins the
// compilers, and the entry's report.json records their version instead. A machine without a compiler runs what was
// compiled elsewhere, for a CPU by any compiler.
#pragma once

#include <condition_variable>
#include <deque>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "hypermla/compile/cache.h"
#include "hypermla/compile/toolchain.h"

namespace hypermla {

// One instance of one kernel template.
struct KernelSource {
  std::string name;      // "flash_attention"
  std::string header;    // below the kernel root: "cutile/mla/flash_attention/flash_attention/flash_attention.cuh"
  std::string instance;  // "hypermla::flash_attention<hypermla::FlashAttentionProblem{.d = 128, ...}, ...>"
  std::vector<int> arguments = {};  // bytes of each argument that its plan passes; empty: not compared with the kernel
  // Of a stand-alone kernel file, whose absolute path `header` is then: "cutile" or "cute", its device part in that
  // language, or "host", the library that hypermla/kernel_file.h describes. Empty: a kernel of this project.
  std::string part = {};
};

// Throws Error when the kernel of `entry` takes other arguments than `source` says.
void require_arguments(const KernelSource& source, const CacheEntry& entry);

struct CompilerConfig {
  std::filesystem::path kernel_root;           // the directory `kernels/`
  std::filesystem::path own_kernel_root = {};  // another one, of the user; empty: none
  std::filesystem::path include_root;          // the directory that holds hypermla/dtype.h
  std::filesystem::path cache;
  std::filesystem::path shipped;  // a cache that is only read, of what an installation brings for GPUs; empty: none
  std::filesystem::path image;    // of that installation, which runs here: the program or the library
  Toolchain toolchain;
  // A program that answers `compile-job` (the CLI): each compilation is then a process of its own, because NVRTC
  // compiles serially within one. Empty: compile in this process.
  std::filesystem::path worker;
  int jobs = 1;
  std::vector<std::string> host_flags;  // further flags for CPU kernels: a debug build, sanitizers
};

class Compiler {
 public:
  explicit Compiler(CompilerConfig config);
  ~Compiler();  // ends what compiles in the background

  const CompilerConfig& config() const { return config_; }
  const KernelCache& cache() const { return cache_; }

  // The entry for `source` on `arch` (sm_90, x86-64-v4, ...): cached, or compiled now. Throws Error when it neither is
  // cached nor compiles (CompileError if that is the compiler's verdict about the source), when no compiler was found,
  // or when the kernel takes other arguments than its plan passes.
  CacheEntry compile(const KernelSource& source, const std::string& arch);
  // The same in the background, at most `jobs` at a time, in the order of the calls.
  std::shared_future<CacheEntry> compile_ahead(const KernelSource& source, const std::string& arch);
  // Whether compile() can succeed: it is cached, or there is a compiler for the target.
  bool available(const KernelSource& source, const std::string& arch) const;

  // The compiler for a target, with its version, and the user's flags: what a verdict about a source holds for. Empty:
  // there is none.
  std::string compiler(const std::string& arch) const;

  // 32 hex digits over the header and everything of this project that it includes, as compiled for GPUs: what a tuning
  // result and a correctness record are valid for. Comments and white space do not count, since they change no machine
  // code; they do count for the keys of the cache, because an entry holds line numbers.
  std::string fingerprint(const std::string& header) const;

  // The worker's half: compiles in this process and publishes. `compile-job` calls it.
  CacheEntry compile_here(const KernelSource& source, const std::string& arch);

 private:
  std::string key(const KernelSource& source, const std::string& arch) const;
  std::optional<CacheEntry> find(const KernelSource& source, const std::string& arch) const;  // in the cache
  std::vector<std::filesystem::path> include_paths(const KernelSource& source, const std::string& arch) const;
  std::filesystem::path path_of(const std::string& header) const;

  CompilerConfig config_;
  KernelCache cache_;
  std::optional<KernelCache> shipped_;
  mutable std::mutex mutex_;
  mutable std::map<bool, std::string> compilers_;  // for a GPU, and for this CPU; asked once
  std::condition_variable wake_;
  std::deque<std::packaged_task<CacheEntry()>> queue_;
  std::map<std::string, std::shared_future<CacheEntry>> pending_;
  std::vector<std::thread> threads_;
  bool stopping_ = false;
  std::stop_source stop_;  // of the programs that compile
};

// The job a worker reads from its standard input, and back. A worker ends with the status kRefused on a CompileError.
constexpr int kRefused = 1;
Json to_json(const KernelSource& source, const std::string& arch, const CompilerConfig& config);
void run_compile_job(const Json& job);

}  // namespace hypermla
