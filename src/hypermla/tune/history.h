// The store of tuning results:
//
//   <root>/<kernel fingerprint>/<problem key>/<device key>/autotuning.json
//
// A result is valid for one source of one kernel, one problem and one device; a change of any of them starts a new
// file.
#pragma once

#include <filesystem>
#include <string_view>

#include "hypermla/base/fields.h"

namespace hypermla {

class TuningHistory {
 public:
  // Each part becomes one directory; characters other than letters, digits, '.', '-' and '_' become '_', so a device
  // may be given by its name. Throws Error when a part is empty or only dots.
  TuningHistory(const std::filesystem::path& root, std::string_view kernel_fingerprint, std::string_view problem_key,
                std::string_view device_key);

  const std::filesystem::path& path() const { return path_; }

  // What was saved last; an empty array if nothing was. What is no file with a JSON array is renamed to "*.corrupt" and
  // ignored, so the kernel is tuned again. Throws Error when the file exists but cannot be read.
  Json load() const;

  // Replaces the file. If the process is killed meanwhile, the old contents stay. Throws Error (disk full...).
  void save(const Json& history) const;

 private:
  std::filesystem::path path_;
};

}  // namespace hypermla
