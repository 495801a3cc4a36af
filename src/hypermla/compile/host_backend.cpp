#include <chrono>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/process.h"
#include "hypermla/compile/backends.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

// "x86-64-v4+avx512bf16" -> {-march=x86-64-v4, -mavx512bf16}; "generic" -> {}.
std::vector<std::string> arch_flags(const std::string& arch) {
  if (arch == "generic") return {};
  const std::size_t plus = arch.find('+');
  std::vector<std::string> flags = {"-march=" + arch.substr(0, plus)};
  if (plus != std::string::npos) flags.push_back("-m" + arch.substr(plus + 1));
  return flags;
}

}  // namespace

std::string cxx_version(const fs::path& cxx) {
  const std::string text = run_process({cxx.string(), "--version"}, {.environment = {{"LC_ALL", "C"}}}).out;
  return text.substr(0, text.find('\n'));
}

BackendOutput compile_host(const fs::path& cxx, const BackendInput& input,
                           const std::vector<std::string>& extra_flags) {
  const auto begin = std::chrono::steady_clock::now();
  const Scratch scratch(input.work_directory / "compile", Scratch::Kind::directory);
  const std::string source_path = (scratch.path() / "kernel.cpp").string();
  const std::string library_path = (scratch.path() / "kernel.so").string();
  // HYPERMLA_TILE_HOST_ENTRY exports hypermla_run_block for one kernel instance (tile_host/entry.h).
  const std::string entry = "#include \"entry.h\"\n\nHYPERMLA_TILE_HOST_ENTRY((" + input.instance + "))\n";
  const std::string source = input.source + (input.exports.empty() ? entry : "");
  write_new_file(source_path, source);

  // No -ffast-math: it would break the -inf and NaN logic of a softmax.
  std::vector<std::string> command = {cxx.string(), "-std=c++20",     "-O3", "-fPIC", "-shared",
                                      "-pthread",   "-Wno-attributes"};
  for (const std::string& flag : arch_flags(input.arch)) command.push_back(flag);
  for (const std::string& flag : extra_flags) command.push_back(flag);
  for (const fs::path& path : input.include_paths) command.push_back("-I" + path.string());
  command.insert(command.end(), {source_path, "-o", library_path});
  // In English, which fail_compilation() reads; and with its own files on the disk of the cache.
  const ProcessResult compiled =
      run_process(command, {.environment = {{"LC_ALL", "C"}, {"TMPDIR", scratch.path().string()}}, .stop = input.stop});
  if (compiled.status != 0) fail_compilation(input, cxx.string(), compiled.status, compiled.err);

  BackendOutput output;
  output.files["kernel.cpp"] = source;
  output.files["kernel.so"] = read_file(library_path);
  output.report["artifact"] = "kernel.so";
  output.report["function"] = input.exports.empty() ? "hypermla_run_block" : input.exports;
  if (const auto parameters = library_parameters(output.files["kernel.so"])) output.report["parameters"] = *parameters;
  output.report["compiler"] = cxx_version(cxx);
  output.report["seconds"] = {
      {"total", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()}};
  return output;
}

}  // namespace hypermla
