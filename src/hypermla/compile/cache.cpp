#include "hypermla/compile/cache.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/hash.h"
#include "hypermla/base/json_file.h"

namespace hypermla {
namespace {
namespace fs = std::filesystem;

constexpr const char* kReport = "report.json";

// A compiler's message may hold bytes that are not UTF-8. The entry must be saved all the same.
std::string text_of(const Json& report) { return report.dump(2, ' ', false, Json::error_handler_t::replace); }

// The report without "hash", hashed: what "hash" must be.
std::string own_hash(Json report) {
  report.erase("hash");
  return content_hash(text_of(report));
}

std::string sealed_text(Json report, const std::map<std::string, std::string>& files) {
  Json listed = Json::object();
  for (const auto& [name, bytes] : files) listed[name] = {{"bytes", bytes.size()}, {"hash", content_hash(bytes)}};
  report["files"] = std::move(listed);
  report["uid"] = ::geteuid();
  report.erase("hash");
  report = Json::parse(text_of(report));  // as a reader will see it, with bytes replaced that JSON cannot hold
  report["hash"] = own_hash(report);
  return text_of(report);
}

// The entry in `dir`, or nothing when any of it is missing, differs from what was published or may be another user's.
std::optional<CacheEntry> read_whole(const fs::path& dir, const fs::path& image) try {
  if (!trusted(dir, image) || !trusted(dir / kReport, image)) return std::nullopt;
  CacheEntry entry{dir, read_json(dir / kReport)};
  if (entry.report.at("hash") != own_hash(entry.report)) return std::nullopt;
  for (const auto& [name, listed] : entry.report.at("files").items()) {
    if (!trusted(dir / name, image)) return std::nullopt;
    const std::string bytes = read_file(dir / name);
    if (listed.at("bytes") != bytes.size() || listed.at("hash") != content_hash(bytes)) return std::nullopt;
  }
  return entry;
} catch (const Error&) {
  return std::nullopt;
} catch (const Json::exception&) {
  return std::nullopt;
}

bool occupied(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));
}

// Renames a damaged entry, then deletes it. No process replaces an existing entry (rename() refuses), so an entry that
// is damaged under the lock is still damaged when it is moved. If there is no entry, another process may publish one at
// any moment.
void discard_damaged(const fs::path& root, const fs::path& dir) {
  const FileDescriptor lock = lock_directory(root);
  if (!occupied(dir) || read_whole(dir, {})) return;
  const fs::path aside = scratch_path(dir);
  std::error_code ignored;  // a read-only cache keeps it, but find() treats it as absent
  fs::rename(dir, aside, ignored);
  fs::remove_all(aside, ignored);
}

bool plain_name(const std::string& name) {
  return !name.empty() && name.front() != '.' && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

}  // namespace

fs::path CacheEntry::path(const std::string& name) const {
  if (name != kReport && !report.at("files").contains(name)) {
    fail("the cache entry '{}' holds no '{}'; delete the entry, so that its kernel is compiled again", dir.string(),
         name);
  }
  return dir / name;
}

fs::path KernelCache::entry_path(const std::string& key) const {
  if (!plain_name(key) || std::filesystem::path(key).extension() == ".tmp") {  // which an entry under construction has
    fail("'{}' cannot be the key of a cache entry; use letters, digits, '-' and '_', such as a hash has", key);
  }
  return root_ / key;
}

void KernelCache::require_trusted_root() const {
  if (image_.empty())
    require_trusted(root_);
  else
    require_trusted(root_, "install the package as root or as yourself", image_);
}

std::optional<CacheEntry> KernelCache::find(const std::string& key) const {
  const fs::path dir = entry_path(key);
  if (!occupied(dir)) return std::nullopt;
  require_trusted_root();
  if (auto entry = read_whole(dir, image_)) return entry;
  if (!image_.empty()) return std::nullopt;  // what an installation brings is only read
  discard_damaged(root_, dir);
  return read_whole(dir, {});  // absent, unless another process has published it anew
}

std::vector<std::string> KernelCache::keys(const std::string& prefix) const {
  std::vector<std::string> found;
  std::error_code absent;
  for (fs::directory_iterator item(root_, absent), end; !absent && item != end; item.increment(absent)) {
    const std::string name = item->path().filename();
    if (name.rfind(prefix, 0) == 0 && item->path().extension() != ".tmp") found.push_back(name);
  }
  std::sort(found.begin(), found.end());
  return found;
}

CacheEntry KernelCache::publish(const std::string& key, const std::map<std::string, std::string>& files,
                                Json report) const {
  const fs::path dir = entry_path(key);
  for (const auto& [name, bytes] : files) {
    if (!plain_name(name) || name == kReport)
      fail("'{}' cannot be a file of a cache entry; give it a plain file name", name);
  }
  make_directories(root_, Access::owner);
  require_trusted(root_);
  const Scratch scratch(dir, Scratch::Kind::directory);
  for (const auto& [name, bytes] : files) write_new_file(scratch.path() / name, bytes);
  const std::string text = sealed_text(std::move(report), files);
  write_new_file(scratch.path() / kReport, text);
  sync_directory(scratch.path());

  // The first process that renames has published. find() removes a damaged entry in the way, and the rename is tried
  // again.
  constexpr int kAttempts = 8;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (::rename(scratch.path().c_str(), dir.c_str()) == 0) {
      sync_directory(root_);
      return {dir, Json::parse(text)};
    }
    if (errno != EEXIST && errno != ENOTEMPTY && errno != ENOTDIR) fail_file("write", dir, errno);
    if (auto theirs = find(key)) return *theirs;
  }
  fail("the damaged cache entry '{}' cannot be replaced; delete it, or choose another cache directory", dir.string());
}

void KernelCache::sweep() const { sweep_scratch(root_); }

}  // namespace hypermla
