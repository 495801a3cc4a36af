#include "hypermla/tune/history.h"

#include <string>
#include <system_error>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/json_file.h"

namespace hypermla {
namespace {

std::string directory_name(std::string_view key) {
  constexpr std::string_view allowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.-_";
  std::string name(key);
  for (char& letter : name) {
    if (allowed.find(letter) == std::string_view::npos) letter = '_';
  }
  if (name.find_first_not_of('.') == std::string::npos) {
    fail("'{}' cannot name a directory of tuning results; give a key with a letter or digit", key);
  }
  return name;
}

}  // namespace

TuningHistory::TuningHistory(const std::filesystem::path& root, std::string_view kernel_fingerprint,
                             std::string_view problem_key, std::string_view device_key)
    : path_(root / directory_name(kernel_fingerprint) / directory_name(problem_key) / directory_name(device_key) /
            "autotuning.json") {}

Json TuningHistory::load() const {
  std::error_code ignored;
  if (!std::filesystem::exists(path_, ignored)) return Json::array();
  Json history;  // null for what is no file, such as a pipe
  if (std::filesystem::is_regular_file(path_, ignored)) history = read_json(path_);
  if (history.is_array()) return history;
  std::filesystem::path corrupt = path_;
  corrupt += ".corrupt";
  std::filesystem::rename(path_, corrupt, ignored);  // in a read-only directory it stays and is ignored
  return Json::array();
}

void TuningHistory::save(const Json& history) const {
  make_directories(path_.parent_path(), Access::owner);
  sweep_scratch(path_.parent_path());
  write_file_atomic(path_, history.dump(1, ' ', false, Json::error_handler_t::replace) + "\n", Access::owner);
}

}  // namespace hypermla
