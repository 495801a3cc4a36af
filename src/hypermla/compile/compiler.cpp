#include "hypermla/compile/compiler.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/hash.h"
#include "hypermla/base/process.h"
#include "hypermla/compile/backends.h"
#include "hypermla/compile/source_text.h"
#include "hypermla/device/architecture.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

// Part of every key; raised when the flags or the layout of an entry change.
constexpr const char* kFormat = "hypermla kernel 1";

// CUDA C++, not CUDA Tile C++.
bool is_cute(const KernelSource& source) {
  return source.part.empty() ? source.header.rfind("cute/", 0) == 0 : source.part == "cute";
}

bool is_host_part(const KernelSource& source) { return source.part == "host"; }

std::string translation_unit(const KernelSource& source) {
  const bool of_file = !source.part.empty() && !is_host_part(source);
  // A kernel file by its name alone, so that its keys are the same wherever it lies.
  const std::string header = source.part.empty() ? source.header : fs::path(source.header).filename().string();
  return "// " + source.instance + "\n" + (of_file ? "#define HYPERMLA_DEVICE\n" : "") + "#include \"" + header +
         "\"\n";
}

// The names and texts of a header's sources, one after the other.
template <class Transform>
std::string closure_text(const fs::path& header, const std::vector<fs::path>& paths, Transform&& transform) {
  std::string all;
  for (const auto& [name, text] : source_closure(header, paths)) all += name + "\n" + transform(text) + "\n";
  return all;
}
std::string closure_text(const fs::path& header, const std::vector<fs::path>& paths) {
  return closure_text(header, paths, [](const std::string& text) -> const std::string& { return text; });
}

}  // namespace

Compiler::Compiler(CompilerConfig config) : config_(std::move(config)), cache_(config_.cache) {
  if (!config_.shipped.empty()) shipped_.emplace(config_.shipped, config_.image);
  for (int i = 0; i < std::max(config_.jobs, 1); ++i)
    threads_.emplace_back([this] {
      for (;;) {
        std::packaged_task<CacheEntry()> task;
        {
          std::unique_lock lock(mutex_);
          wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
          if (stopping_) return;
          task = std::move(queue_.front());
          queue_.pop_front();
        }
        task();
      }
    });
}

Compiler::~Compiler() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.request_stop();
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::vector<fs::path> Compiler::include_paths(const KernelSource& source, const std::string& arch) const {
  const fs::path tile = config_.kernel_root / "cutile";
  std::vector<fs::path> paths = {config_.kernel_root, tile, config_.kernel_root / "cute", config_.include_root};
  if (const fs::path& own = config_.own_kernel_root; !own.empty())
    paths.insert(paths.end(), {own, own / "cutile", own / "cute"});
  if (!is_gpu_arch(arch)) paths.push_back(tile / "tile_host");  // stands in for <cuda_tile.h>
  if (!source.part.empty()) paths.push_back(fs::path(source.header).parent_path());
  return paths;
}

fs::path Compiler::path_of(const std::string& header) const {
  std::vector<fs::path> roots = {config_.kernel_root};
  if (!config_.own_kernel_root.empty()) roots.push_back(config_.own_kernel_root);
  for (const fs::path& root : roots)
    if (fs::exists(root / header)) return root / header;
  for (const fs::path& root : roots)
    if (const fs::path directory = (root / header).parent_path(); fs::is_directory(directory))
      fail("a plan names {}, which is not in {}; write that file, or correct the name in the plan, as in beside()",
           fs::path(header).filename().string(), directory.string());
  if (!config_.own_kernel_root.empty())
    fail("{} is neither in {} nor in {}; point HYPERMLA_KERNELS at the directory that this program was built with",
         header, config_.kernel_root.string(), config_.own_kernel_root.string());
  fail("{} is not in {}; if it is a kernel of your own, point HYPERMLA_KERNELS at its directory `kernels`", header,
       config_.kernel_root.string());
}

std::string Compiler::key(const KernelSource& source, const std::string& arch) const {
  std::string text = std::string(kFormat) + "\n" + arch + "\n" + translation_unit(source);
  if (!is_gpu_arch(arch))
    for (const std::string& flag : config_.host_flags) text += flag + "\n";
  text += closure_text(path_of(source.header), include_paths(source, arch));
  if (!is_gpu_arch(arch))
    text += closure_text(config_.kernel_root / "cutile/tile_host/entry.h", include_paths(source, arch));
  const std::string without_compiler = source.name + "-" + arch + "-" + content_hash(text);
  if (is_gpu_arch(arch) || config_.toolchain.cxx.empty()) return without_compiler;
  return without_compiler + "-" + content_hash(compiler(arch)).substr(0, 8);
}

std::optional<CacheEntry> Compiler::find(const KernelSource& source, const std::string& arch) const {
  const std::string sought = key(source, arch);
  if (is_gpu_arch(arch)) {
    if (auto entry = cache_.find(sought); entry || !shipped_) return entry;
    try {
      return shipped_->find(sought);
    } catch (const Error&) {  // other users may write the installation
      if (config_.toolchain.cuda_root.empty()) throw;
      return std::nullopt;
    }
  }
  if (!config_.toolchain.cxx.empty()) return cache_.find(sought);
  for (const std::string& present : cache_.keys(sought + "-"))
    if (auto entry = cache_.find(present)) return entry;
  return std::nullopt;
}

std::string Compiler::fingerprint(const std::string& header) const {
  return content_hash(closure_text(path_of(header), include_paths({}, "sm_90"), without_comments));
}

std::string Compiler::compiler(const std::string& arch) const {
  const bool gpu = is_gpu_arch(arch);
  const Toolchain& tools = config_.toolchain;
  if ((gpu ? tools.cuda_root : tools.cxx).empty()) return "";
  std::lock_guard lock(mutex_);
  std::string& text = compilers_[gpu];
  if (text.empty()) {
    text = gpu ? "NVRTC " + nvrtc_version(tools.cuda_root) + ", " + tileiras_version(tools.cuda_root)
               : fs::weakly_canonical(tools.cxx).string() + ", " + cxx_version(tools.cxx);
    if (!gpu)
      for (const std::string& flag : config_.host_flags) text += " " + flag;
  }
  return text;
}

bool Compiler::available(const KernelSource& source, const std::string& arch) const {
  const bool has_compiler = !(is_gpu_arch(arch) ? config_.toolchain.cuda_root : config_.toolchain.cxx).empty();
  return has_compiler || find(source, arch).has_value();
}

CacheEntry Compiler::compile_here(const KernelSource& source, const std::string& arch) {
  if (auto entry = find(source, arch)) return *entry;
  const std::string entry_key = key(source, arch);
  const Toolchain& tools = config_.toolchain;
  const BackendInput input{translation_unit(source),
                           source.instance,
                           arch,
                           include_paths(source, arch),
                           config_.cache,
                           stop_.get_token(),
                           is_host_part(source) ? "hypermla_describe" : ""};
  make_directories(config_.cache, Access::owner);
  cache_.sweep();
  BackendOutput output;
  if (is_gpu_arch(arch)) {
    if (tools.cuda_root.empty()) {
      std::string searched;
      for (const fs::path& root : tools.searched) searched += (searched.empty() ? " in " : ", ") + root.string();
      fail(
          "{} is not in the cache {} for {}, or not whole there, and no CUDA Tile compiler was found{}; run ./hypermla "
          "once or, of the Python package, pip install its extra `compilers`, or set HYPERMLA_CUDA_ROOT to a CUDA "
          "toolkit 13.3 or newer",
          source.name, config_.cache.string(), arch, searched);
    }
    output = is_cute(source) ? compile_cuda(tools.cuda_root, input) : compile_tile(tools.cuda_root, input);
  } else {
    if (is_cute(source))
      fail("{} is written for NVIDIA GPUs of Hopper's kind; on a CPU take --language=cutile", source.name);
    if (tools.cxx.empty())
      fail("{} is not in the cache for this CPU and no C++ compiler was found; install g++ or set CXX", source.name);
    output = compile_host(tools.cxx, input, config_.host_flags);
  }
  if (key(source, arch) != entry_key) return compile_here(source, arch);  // a text was changed meanwhile
  output.files["kernel.cu"] = input.source;
  output.report["name"] = source.name;
  output.report["instance"] = source.instance;
  output.report["arch"] = arch;
  return cache_.publish(entry_key, output.files, output.report);
}

CacheEntry Compiler::compile(const KernelSource& source, const std::string& arch) {
  return compile_ahead(source, arch).get();
}

std::shared_future<CacheEntry> Compiler::compile_ahead(const KernelSource& source, const std::string& arch) {
  const std::string entry_key = key(source, arch);
  std::lock_guard lock(mutex_);
  // What is done is asked of the cache again: a failure may have been a full disk, and an entry may have been deleted.
  if (auto found = pending_.find(entry_key); found != pending_.end()) {
    if (found->second.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return found->second;
    pending_.erase(found);
  }
  auto find_or_compile = [this, source, arch]() -> CacheEntry {
    if (auto entry = find(source, arch)) return *entry;
    if (config_.worker.empty()) return compile_here(source, arch);
    const ProcessResult result =
        run_process({config_.worker.string(), "compile-job"},
                    {.input = to_json(source, arch, config_).dump(), .stop = stop_.get_token()});
    if (result.status != 0) {
      constexpr std::string_view kPrefix = "hypermla: ";  // of a program's message; the caller adds its own
      std::string said = result.err.substr(0, result.err.find_last_not_of("\n") + 1);
      if (said.rfind(kPrefix, 0) == 0) said.erase(0, kPrefix.size());
      if (said.empty()) fail("the compiler process for {} died (status {})", source.name, result.status);
      if (result.status == kRefused) throw CompileError(said);
      fail("{}", said);
    }
    if (auto entry = find(source, arch)) return *entry;
    fail("{} was compiled, but its cache entry is gone; check that {} is on a working disk", source.name,
         config_.cache.string());
  };
  std::packaged_task<CacheEntry()> task([source, find_or_compile] {
    CacheEntry entry = find_or_compile();
    require_arguments(source, entry);
    return entry;
  });
  std::shared_future<CacheEntry> future = task.get_future().share();
  pending_[entry_key] = future;
  queue_.push_back(std::move(task));
  wake_.notify_one();
  return future;
}

void require_arguments(const KernelSource& source, const CacheEntry& entry) {
  const std::string artifact = entry.report.at("artifact");
  if (source.arguments.empty()) return;
  const bool of_gpu = fs::path(artifact).extension() == ".cubin";
  const std::vector<int> taken = of_gpu ? read_cubin(read_file(entry.path(artifact))).parameters
                                        : entry.report.value("parameters", source.arguments);
  if (taken != source.arguments)
    fail(
        "{} takes {} arguments of {} bytes, but {} passes {} of {} bytes; give {} the order and the types of the "
        "parameters in {}",
        source.name, taken.size(), fmt::join(taken, ", "), source.part.empty() ? "its plan" : "describe()",
        source.arguments.size(), fmt::join(source.arguments, ", "),
        source.part.empty() ? "the plan's Arguments" : "its calls of pass()", source.header);
}

Json to_json(const KernelSource& source, const std::string& arch, const CompilerConfig& config) {
  const std::vector<fs::path>& searched = config.toolchain.searched;
  return {{"name", source.name},
          {"header", source.header},
          {"instance", source.instance},
          {"arguments", source.arguments},
          {"part", source.part},
          {"arch", arch},
          {"kernel_root", config.kernel_root.string()},
          {"own_kernel_root", config.own_kernel_root.string()},
          {"include_root", config.include_root.string()},
          {"cache", config.cache.string()},
          {"shipped", config.shipped.string()},
          {"image", config.image.string()},
          {"cuda_root", config.toolchain.cuda_root.string()},
          {"searched", std::vector<std::string>(searched.begin(), searched.end())},
          {"cxx", config.toolchain.cxx.string()},
          {"host_flags", config.host_flags},
          {"caller", ::getpid()}};
}

void run_compile_job(const Json& job) {
  CompilerConfig config;
  config.kernel_root = job.at("kernel_root").get<std::string>();
  config.own_kernel_root = job.at("own_kernel_root").get<std::string>();
  config.include_root = job.at("include_root").get<std::string>();
  config.cache = job.at("cache").get<std::string>();
  config.shipped = job.at("shipped").get<std::string>();
  config.image = job.at("image").get<std::string>();
  config.toolchain.cuda_root = job.at("cuda_root").get<std::string>();
  for (const Json& root : job.at("searched")) config.toolchain.searched.emplace_back(root.get<std::string>());
  config.toolchain.cxx = job.at("cxx").get<std::string>();
  config.host_flags = job.at("host_flags").get<std::vector<std::string>>();
  const KernelSource source{job.at("name"), job.at("header"), job.at("instance"), job.at("arguments"), job.at("part")};
  Compiler(config).compile_here(source, job.at("arch"));
}

}  // namespace hypermla
