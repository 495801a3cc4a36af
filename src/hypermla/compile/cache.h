// The store of compiled kernels. An entry is a directory that explains itself:
//
//   <root>/<key>/kernel.cu      what was compiled
//   <root>/<key>/kernel.cubin   the artifact, or several, under any names
//   <root>/<key>/report.json    registers, spills, compiler version; the uid of its maker; bytes and hash of each file;
//                               a hash of itself
//
// The key is the hash of all that the artifact depends on, so entries never change: they are published completely or
// not at all. Any number of processes may use one root at once and be killed at any moment. Every entry that find()
// returns is complete.
//
// Entries are loaded as code, so only what belongs to this user or to root, and what no other user may write, counts as
// an entry. Entries are written for this user alone: to share a cache, its owner lets the others read it (chmod).
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "hypermla/base/fields.h"

namespace hypermla {

struct CacheEntry {
  std::filesystem::path dir;
  Json report;  // as published, plus "uid", "files": {name: {"bytes": n, "hash": content_hash}} and "hash"

  std::filesystem::path path(const std::string& name) const;  // throws Error when the entry holds no such file
};

class KernelCache {
 public:
  // Touches no file: the root is created by the first publish() and may be read-only where nothing is published.
  // `image`: of what came with the entries and runs here (require_trusted() in files.h); empty: this user's cache.
  explicit KernelCache(std::filesystem::path root, std::filesystem::path image = {})
      : root_(std::move(root)), image_(std::move(image)) {}

  // The entry, after its files were read and compared with their hashes. An entry that is damaged, or that another user
  // could have written, is removed and reported as absent, so that its kernel is compiled again. Throws Error when
  // another user may write the root. What came with an image is only read.
  std::optional<CacheEntry> find(const std::string& key) const;

  // The keys of the entries that begin so, in their order. Nothing was read of them.
  std::vector<std::string> keys(const std::string& prefix) const;

  // Stores an entry made of `files` (name to bytes) and returns it, or the one that another process had published
  // meanwhile. Throws Error, leaving nothing behind, when the disk is full or not writable.
  CacheEntry publish(const std::string& key, const std::map<std::string, std::string>& files, Json report) const;

  // Removes what killed processes have left half written.
  void sweep() const;

  const std::filesystem::path& root() const { return root_; }

 private:
  std::filesystem::path entry_path(const std::string& key) const;

  void require_trusted_root() const;

  std::filesystem::path root_, image_;
};

}  // namespace hypermla
