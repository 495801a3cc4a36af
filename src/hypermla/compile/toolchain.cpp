#include "hypermla/compile/toolchain.h"

#include <unistd.h>

#include <sstream>
#include <system_error>

#include "hypermla/compile/backends.h"

namespace hypermla {

namespace fs = std::filesystem;

Toolchain Toolchain::find(const std::vector<fs::path>& cuda_roots, const std::vector<std::string>& compilers,
                          const std::string& path) {
  Toolchain found;
  for (const fs::path& root : cuda_roots) {
    if (root.empty()) continue;
    found.searched.push_back(root);
    std::error_code unreadable;  // is as good as absent
    if (fs::exists(root / "bin/tileiras", unreadable) && !nvrtc_library(root).empty()) {
      found.cuda_root = root;
      break;
    }
  }
  for (const std::string& compiler : compilers) {
    if (compiler.empty() || !found.cxx.empty()) continue;
    if (compiler.find('/') != std::string::npos) {
      if (::access(compiler.c_str(), X_OK) == 0) found.cxx = compiler;
      continue;
    }
    std::istringstream directories(path);
    for (std::string directory; std::getline(directories, directory, ':');)
      if (found.cxx.empty() && ::access((fs::path(directory) / compiler).c_str(), X_OK) == 0)
        found.cxx = fs::path(directory) / compiler;
  }
  return found;
}

Json describe(const Toolchain& toolchain) {
  Json found;
  found["cuda_root"] = toolchain.cuda_root.string();
  found["nvrtc"] = toolchain.cuda_root.empty() ? "" : nvrtc_version(toolchain.cuda_root);
  found["cxx"] = toolchain.cxx.string();
  found["cxx_version"] = toolchain.cxx.empty() ? "" : cxx_version(toolchain.cxx);
  return found;
}

}  // namespace hypermla
