// Files that are either whole or absent, whatever kills the process or fills the disk.
// Every function throws Error: a sentence that names the path and says what to do next.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace hypermla {

std::string read_file(const std::filesystem::path& path);

// Replaces `path` by `bytes`: written beside it, synced, renamed, and the directory synced. Readers see the old contents or
// the new ones; on failure the old ones stay and nothing is left beside them. The directory must exist.
void write_file_atomic(const std::filesystem::path& path, std::string_view bytes);

// Writes a file that must not exist yet and syncs it: a part of a directory that is itself under construction.
void write_new_file(const std::filesystem::path& path, std::string_view bytes);

// Creates `path` and its parents. It is no error when they exist.
void make_directories(const std::filesystem::path& path);

// Makes the names in a directory (what was created or renamed there) survive a power cut.
void sync_directory(const std::filesystem::path& path);

// Owns an open file and the lock on it, if any.
class FileDescriptor {
 public:
  explicit FileDescriptor(int number = -1) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(other.number_) { other.number_ = -1; }
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();
  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_;
};

// Waits for the exclusive lock on a directory and holds it until destroyed; the kernel drops it when the process dies.
// Where the file system knows no locks, it holds nothing.
FileDescriptor lock_directory(const std::filesystem::path& path);

// A file or directory under construction beside its final place, named "<target>.<pid>.<random>.tmp" and locked as long as
// its maker lives. Destroying it removes what was not renamed away.
class Scratch {
 public:
  enum class Kind { file, directory };
  Scratch(const std::filesystem::path& target, Kind kind);
  Scratch(const Scratch&) = delete;
  ~Scratch();
  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return lock_.number(); }  // of a file: open for writing

 private:
  std::filesystem::path path_;
  FileDescriptor lock_;
};

// A fresh name for something beside `target` that sweep_scratch() may remove as soon as nobody holds its lock.
std::filesystem::path scratch_path(const std::filesystem::path& target);

// Removes from `directory` what a Scratch of a dead process left there. Does nothing when the directory is absent.
void sweep_scratch(const std::filesystem::path& directory);

// Throws the Error for a failed system call: `verb` is "read" or "write", `error` an errno.
[[noreturn]] void fail_file(std::string_view verb, const std::filesystem::path& path, int error);

}  // namespace hypermla
