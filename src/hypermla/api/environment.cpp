#include "hypermla/api/environment.h"

#include <dlfcn.h>
#include <link.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <sstream>
#include <thread>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// Where a relative path would lie depends on where the program is started: perhaps in another user's directory.
fs::path absolute_variable(const char* name) {
  const fs::path path = variable(name);
  if (!path.empty() && !path.is_absolute())
    fail("{}={} is not an absolute path; set it to one, or unset it", name, path.string());
  return path;
}

bool is_root(const fs::path& path) {
  std::error_code unreadable;  // is as good as absent
  return fs::exists(path / "kernels/cutile/tile.h", unreadable);
}

fs::path find_image() {
  Dl_info info{};
  void* found = nullptr;
  dladdr1(reinterpret_cast<void*>(&is_root), &info, &found, RTLD_DL_LINKMAP);
  const char* library = found ? static_cast<const link_map*>(found)->l_name : "";
  // The program itself has no name there; the kernel knows its file, under any name or link by which it was started.
  std::error_code error;
  return *library ? fs::absolute(library, error) : fs::read_symlink("/proc/self/exe", error);
}

// The image (program or library) that this code was linked into. Found when it is loaded: by a relative path it would
// be another one once the process has changed its directory.
const fs::path loaded_image = find_image();
const fs::path& own_image() { return loaded_image; }

bool is_below(const fs::path& path, const fs::path& directory) {
  const fs::path inside = path.lexically_relative(directory);
  return !inside.empty() && *inside.begin() != "..";
}

// All that lies below a directory.
std::vector<fs::directory_entry> files_below(const fs::path& path) try {
  return {fs::recursive_directory_iterator(path), fs::recursive_directory_iterator()};
} catch (const fs::filesystem_error& error) {
  fail("not all below '{}' can be read ({}); make it readable, or choose another place", path.string(),
       error.code().message());
}

// Who can put code into this process as it is: this user, root, and who may write this image or, where it was built in
// it, the checkout. Nobody else may write what is compiled or run.
class Writers {
 public:
  explicit Writers(const fs::path& root) {
    const fs::path& image = own_image();
    add(image, true);
    add(image.parent_path(), false);
    if (is_below(image, root)) add(root, true);
  }
  bool alone_write(const fs::path& path) const {
    struct stat status {};
    return ::stat(path.c_str(), &status) == 0 && owners_.count(status.st_uid) &&
           !(status.st_mode & (S_IWGRP | S_IWOTH) & ~writable_);
  }
  // By what another user may change `path`: it itself, or a directory above it that does not hold this image, too.
  // Empty: by nothing.
  fs::path exposed(const fs::path& path) const {
    if (!alone_write(path)) return path;
    const fs::path above = open_above(path);
    std::error_code ignored;
    return above.empty() || is_below(fs::weakly_canonical(own_image(), ignored), above) ? fs::path() : above;
  }

 private:
  void add(const fs::path& path, bool owner) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) return;
    if (owner) owners_.insert(status.st_uid);
    if (!(status.st_mode & S_ISVTX)) writable_ |= status.st_mode;
  }

  std::set<uid_t> owners_ = {::geteuid(), 0};
  mode_t writable_ = 0;  // of S_IWGRP and S_IWOTH
};

// `exposed` is by what another user may change what lies at `path`, a directory; `instead` what else could be used.
void require_unexposed(const fs::path& exposed, const fs::path& path, std::string_view instead) {
  if (exposed.empty()) return;
  const bool inside = is_below(exposed, path);
  fail(
      "'{}' is not used, because another user may write {} and could put code there that would run as you; run `{}`, "
      "or set {}",
      (inside ? exposed : path).string(), inside ? "it" : "'" + exposed.string() + "'",
      inside ? "chmod -R go-w '" + path.string() + "'" : "chmod o-w '" + exposed.string() + "'", instead);
}

// The sources below a root are compiled and run.
void require_sources(const fs::path& root) {
  const Writers writers(root);
  const auto require = [&](const fs::path& exposed) {
    require_unexposed(exposed, root, "HYPERMLA_ROOT to a checkout or a <prefix>/share/hypermla of your own");
  };
  require(writers.exposed(root));
  for (const fs::path& directory : {root / "kernels", root / "include"})
    if (std::error_code absent; fs::exists(directory, absent)) {
      require(writers.exposed(directory));
      for (const auto& one : files_below(directory))
        if (!writers.alone_write(one.path())) require(one.path());
    }
}

// Of what is loaded or started of a toolkit, that which another user may change; empty: nothing.
fs::path exposed_in_toolkit(const Writers& writers, const fs::path& toolkit) {
  for (const char* part : {"", "bin", "bin/tileiras", "bin/ptxas", "bin/ncu", "bin/nsys", "include", "lib",
                           "lib/libnvrtc.so.13", "lib/libcupti.so.13", "lib64", "lib64/libnvrtc.so.13",
                           "lib64/libcupti.so.13", "extras/CUPTI/lib64", "extras/CUPTI/lib64/libcupti.so.13"}) {
    std::error_code absent;
    const fs::path path = *part ? toolkit / part : toolkit;
    if (!fs::exists(path, absent)) continue;
    if (fs::path exposed = writers.exposed(path); !exposed.empty()) return exposed;
  }
  return {};
}

fs::path find_root() {
  if (const std::string root = variable("HYPERMLA_ROOT"); !root.empty()) {
    if (is_root(root)) return fs::absolute(root);  // the process may change its directory
    fail("HYPERMLA_ROOT={} does not hold kernels/cutile; point it at a checkout or at <prefix>/share/hypermla", root);
  }
  const fs::path image = own_image();
  for (fs::path directory = image.parent_path();; directory = directory.parent_path()) {
    for (const fs::path& candidate : {directory, directory / "share/hypermla"})
      if (is_root(candidate)) return candidate;
    if (directory == directory.parent_path()) break;
  }
  fail("the kernels' sources were not found near {}; set HYPERMLA_ROOT to a checkout or to <prefix>/share/hypermla",
       image.string());
}

// Its sources are compiled and loaded, so all of them are checked.
fs::path find_own_kernels() {
  fs::path path = absolute_variable("HYPERMLA_KERNELS");
  if (path.empty()) return path;
  if (!path.has_filename()) path = path.parent_path();  // a slash at the end
  std::error_code unknown;
  if (path.filename() != "kernels" || !fs::is_directory(path, unknown))
    fail("HYPERMLA_KERNELS={} is no directory of the name kernels; make it, or unset the variable", path.string());
  require_trusted(path);
  if (fs::is_symlink(path))
    fail("HYPERMLA_KERNELS={} is a link, which may lead elsewhere tomorrow; set it to the directory itself",
         path.string());
  for (const auto& one : files_below(path))
    if (!trusted(one.path()))
      fail(
          "'{}' is not used, because it is a link, or other users may write it: they could put code there that would "
          "run as you; replace it, or run `chmod -R go-w '{}'`",
          one.path().string(), path.string());
  return path;
}

fs::path find_cache(const fs::path& root) {
  if (const fs::path path = absolute_variable("HYPERMLA_CACHE_DIR"); !path.empty()) return path;
  if (fs::exists(root / "CMakeLists.txt")) return root / ".cache";
  if (const fs::path path = absolute_variable("XDG_CACHE_HOME"); !path.empty()) return path / "hypermla";
  if (const fs::path path = absolute_variable("HOME"); !path.empty()) return path / ".cache/hypermla";
  if (const passwd* user = ::getpwuid(::geteuid()); user && *user->pw_dir == '/')
    return fs::path(user->pw_dir) / ".cache/hypermla";
  fail("there is no place for a cache: set HYPERMLA_CACHE_DIR");
}

// Where wheels put the toolkit: <environment>/lib/python3.N/site-packages/nvidia/cu13, for the checkout's own
// environment and for the one that this library is installed in.
std::vector<fs::path> wheel_roots(const fs::path& root) {
  std::vector<fs::path> roots;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root / ".venv/lib", error))
    roots.push_back(entry.path() / "site-packages/nvidia/cu13");
  for (fs::path directory = own_image().parent_path(); directory != directory.parent_path();
       directory = directory.parent_path())
    if (directory.filename() == "site-packages") roots.push_back(directory / "nvidia/cu13");
  const fs::path package = own_image().parent_path();  // in dist-packages, or where pip's --target says
  if (root == package / "share/hypermla") roots.push_back(package.parent_path() / "nvidia/cu13");
  return roots;
}

// The command line: this very program, or the one that lies beside this library in a checkout, a wheel or an
// installation.
fs::path find_program(const fs::path& root) {
  const fs::path image = own_image();
  std::error_code error;
  if (image == fs::read_symlink("/proc/self/exe", error)) return image;
  for (fs::path directory = image.parent_path(); directory != directory.parent_path();
       directory = directory.parent_path())
    if (const fs::path program = directory / "bin/hypermla"; fs::is_regular_file(program, error))
      return Writers(root).alone_write(program) ? program : fs::path();
  return {};
}

ProfileTools find_tools(const Environment& environment) {
  std::vector<fs::path> toolkits = {environment.toolchain.cuda_root};
  for (const fs::path& root : wheel_roots(environment.root)) toolkits.push_back(root);
  toolkits.push_back("/usr/local/cuda");
  const Writers writers(environment.root);
  std::erase_if(toolkits,
                [&](const fs::path& root) { return root.empty() || !exposed_in_toolkit(writers, root).empty(); });
  ProfileTools tools = find_profile_tools(toolkits, variable("PATH"));
  tools.rules = environment.root / "conf/profile_rules.json";
  tools.cards = environment.root / "docs/knowledge";
  tools.program = find_program(environment.root);
  tools.kernel_roots = {environment.kernel_root()};
  if (!environment.own_kernels.empty()) tools.kernel_roots.push_back(environment.own_kernels);
  tools.clock_lock = environment.cache / "locked-clocks.json";
  return tools;
}

std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> result;
  for (std::string word; stream >> word;) result.push_back(word);
  return result;
}

}  // namespace

Environment Environment::detect() {
  Environment environment;
  environment.root = find_root();
  require_sources(environment.root);
  environment.own_kernels = find_own_kernels();
  environment.cache = find_cache(environment.root);
  require_trusted(environment.cache);
  std::vector<fs::path> roots = {absolute_variable("HYPERMLA_CUDA_ROOT")};  // which stands for no other one
  if (roots.front().empty()) {
    roots = wheel_roots(environment.root);
    roots.push_back(absolute_variable("CUDA_HOME"));
    roots.push_back("/usr/local/cuda");
  }
  std::vector<std::string> compilers = {"g++", "c++", "clang++"};
  const std::string cxx = variable("CXX");
  if (!cxx.empty()) compilers = {cxx};
  environment.toolchain = Toolchain::find(roots, compilers, variable("PATH"));
  if (const fs::path& toolkit = environment.toolchain.cuda_root; !toolkit.empty())
    require_unexposed(exposed_in_toolkit(Writers(environment.root), toolkit), toolkit,
                      "HYPERMLA_CUDA_ROOT to a CUDA toolkit of your own");
  if (!cxx.empty() && environment.toolchain.cxx.empty())
    fail("CXX={} is no program that can be run; set it to the path of a C++20 compiler, without flags, or unset it",
         cxx);
  environment.host_flags = words(variable("HYPERMLA_HOST_FLAGS"));
  environment.profile_tools = find_tools(environment);
  return environment;
}

std::vector<std::string> Environment::unbuilt_kernels() const {
  std::vector<std::string> unbuilt;
  if (own_kernels.empty()) return unbuilt;
  const std::vector<KernelEntry> built = Registry::instance().all();
  for (const auto& one : files_below(own_kernels)) {
    const fs::path directory = one.path().parent_path();
    if (one.path().filename() != directory.filename().string() + ".cpp") continue;
    const fs::path place = directory.lexically_relative(own_kernels);
    // Others are helpers of versions: those lie in <language>/<layer>/<design>/<version>.
    if (std::distance(place.begin(), place.end()) != 4 ||
        version_in(place.filename(), place.parent_path().filename()).empty())
      continue;
    const std::string below = place.string();
    if (std::none_of(built.begin(), built.end(), [&](const KernelEntry& entry) { return entry.directory == below; }))
      unbuilt.push_back(below);
  }
  return unbuilt;
}

bool Environment::is_own(const KernelEntry& entry) const {
  return !own_kernels.empty() && fs::exists(own_kernels / entry.directory);
}

fs::path Environment::record_of(const KernelEntry& entry) const {
  return is_own(entry) ? own_kernels / "verified.json" : root / "results/verified.json";
}

fs::path Environment::project_of(const KernelEntry& entry) const {
  return is_own(entry) ? own_kernels.parent_path() : root;
}

CompilerConfig Environment::compiler_config() const {
  CompilerConfig config;
  config.kernel_root = kernel_root();
  config.own_kernel_root = own_kernels;
  config.include_root = root / "include";
  config.cache = cache / "kernels";
  config.shipped = root / "compiled";
  config.image = own_image();
  config.toolchain = toolchain;
  config.host_flags = host_flags;
  config.jobs = int(std::max(1u, std::thread::hardware_concurrency()));
  return config;
}

DeviceTable Environment::devices() const { return DeviceTable::load(root / "conf/devices.json", measured_devices()); }

namespace {

// Of a device that is not in the table: by its multiprocessors that of its architecture which is, or else a GPU in the
// middle, since only ratios matter.
DeviceSpec guess(const DeviceTable& table, const DeviceInfo& info) {
  DeviceSpec spec = table.of_arch(info.arch);
  std::string as = "a GPU in the middle";
  if (spec.arch == info.arch && spec.sm_count > 0) {
    as = spec.name;
    const double share = double(info.processors) / spec.sm_count;
    for (double* peak : {&spec.bfloat16_tflops, &spec.float16_tflops, &spec.float32_tflops}) *peak *= share;
  } else {
    spec = {};
    spec.bfloat16_tflops = spec.float16_tflops = 150;
    spec.float32_tflops = 30;
    spec.peak_gbps = 1000;
  }
  spec.measured = Json::object();
  spec.note =
      fmt::format("a guess, {}: this device is not in conf/devices.json; `hypermla device --measure` adds it", as);
  return spec;
}

}  // namespace

DeviceSpec spec_for(const DeviceTable& table, const Device& device) {
  const DeviceInfo& info = device.info();
  const DeviceSpec unknown = device.is_gpu() ? guess(table, info) : table.find("CPU");
  DeviceSpec spec = table.contains(info.name) ? table.find(info.name) : unknown;
  for (double DeviceSpec::*peak :
       {&DeviceSpec::bfloat16_tflops, &DeviceSpec::float16_tflops, &DeviceSpec::float32_tflops, &DeviceSpec::peak_gbps})
    if (spec.*peak == 0) spec.*peak = unknown.*peak;
  // What an entry does not say, as one that was measured here alone, the device does.
  if (spec.name != info.name || spec.sm_count == 0) spec.sm_count = info.processors;
  if (device.is_gpu() && spec.arch.empty()) spec.arch = info.arch;
  spec.name = info.name;
  return spec;
}

PlannedDevice planned_device(const DeviceTable& table, const Device& present) {
  return {Target::of(present.info()), spec_for(table, present)};
}

PlannedDevice planned_device(const DeviceTable& table, const std::string& name) {
  PlannedDevice device{{}, table.find(name)};
  DeviceSpec& spec = device.spec;
  if (spec.arch.empty())
    device.target = Target::of(make_cpu_device()->info());
  else
    device.target = {spec.arch, spec.sm_count ? spec.sm_count : Target::of_arch(spec.arch).processors};
  if (spec.sm_count == 0) spec.sm_count = device.target.processors;
  return device;
}

}  // namespace hypermla
