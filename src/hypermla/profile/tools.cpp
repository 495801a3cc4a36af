#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "hypermla/profile/profilers.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

bool is_program(const fs::path& path) {
  std::error_code unreadable;  // is as good as absent
  return fs::is_regular_file(path, unreadable) && ::access(path.c_str(), X_OK) == 0;
}

// In `directories`, then in the newest of the directories that NVIDIA's installers make: <root>/<version>/<inner>.
std::string find_program(const std::string& name, const std::vector<fs::path>& directories, const fs::path& installed,
                         const fs::path& inner) {
  for (const fs::path& directory : directories)
    if (is_program(directory / name)) return (directory / name).string();
  std::vector<fs::path> versions;
  std::error_code absent;
  for (const auto& entry : fs::directory_iterator(installed, absent))
    if (is_program(entry.path() / inner / name)) versions.push_back(entry.path() / inner / name);
  if (versions.empty()) return "";
  return std::max_element(versions.begin(), versions.end())->string();
}

}  // namespace

ProfileTools find_profile_tools(const std::vector<fs::path>& toolkits, const std::string& path) {
  ProfileTools tools;
  std::vector<fs::path> programs;
  std::istringstream words(path);
  for (std::string directory; std::getline(words, directory, ':');) programs.push_back(directory);
  for (const fs::path& root : toolkits) {
    if (root.empty()) continue;
    programs.push_back(root / "bin");
    for (const char* directory : {"lib", "lib64", "extras/CUPTI/lib64"}) {
      std::error_code unreadable;
      if (const fs::path library = root / directory / "libcupti.so.13"; fs::exists(library, unreadable))
        tools.cupti.push_back(library);
    }
  }
  tools.cupti.push_back("libcupti.so.13");  // wherever the loader finds it
  tools.ncu = find_program("ncu", programs, "/opt/nvidia/nsight-compute", "");
  tools.nsys = find_program("nsys", programs, "/opt/nvidia/nsight-systems", "bin");
  return tools;
}

}  // namespace hypermla
