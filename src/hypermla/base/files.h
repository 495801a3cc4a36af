// Files that are either complete or absent, even if the process is killed or the disk is full. Every function throws
// Error: a sentence that names the path and says what to do next.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace hypermla {

// Who may read what is written: the users that the umask admits; or, with any umask, this user alone (files 0600,
// directories 0700).
enum class Access { by_umask, owner };

// Throws Error unless `path` is trusted, if it exists: it belongs to this user or to root, and no other user may write
// it. Neither may everyone write a directory above it, unless that has the sticky bit, as /tmp does. Code is loaded
// from such places only. `advice` says what to do about a path of another user.
// `image`: of a program or library that runs here. Who may write or replace it runs code as this user already, so what
// nobody else may write is trusted, too.
void require_trusted(const std::filesystem::path& path,
                     std::string_view advice = "choose a directory of your own (HYPERMLA_CACHE_DIR)",
                     const std::filesystem::path& image = {});
// Whether `path` itself belongs to this user or to root, and no other user may write it; or nobody but who may write
// `image`. A symbolic link is not trusted.
bool trusted(const std::filesystem::path& path, const std::filesystem::path& image = {});
// The nearest directory above `path` in which any user may put another file in the place of what is there: all may
// write it, and it has no sticky bit. Empty: none.
std::filesystem::path open_above(const std::filesystem::path& path);

// Throws Error, too, when it is no regular file: reading a pipe could wait for ever.
std::string read_file(const std::filesystem::path& path);

// Replaces `path` by `bytes`: written beside it, synced, renamed, and the directory synced. Readers see the old
// contents or the new ones. On failure the old ones stay, and no temporary file is left. The directory must exist. A
// link stays, and what it leads to is replaced.
void write_file_atomic(const std::filesystem::path& path, std::string_view bytes, Access access = Access::by_umask);

// Writes and syncs a file that must not exist yet, as part of a directory that is not published yet: Access::owner.
void write_new_file(const std::filesystem::path& path, std::string_view bytes);

// Creates `path` and its parents. It is no error when they exist.
void make_directories(const std::filesystem::path& path, Access access = Access::by_umask);

// Throws Error unless this process may create files in `path` or, where it does not exist, make it. Leaves nothing
// there.
void require_writable(const std::filesystem::path& path);

// Syncs a directory, so that names created or renamed in it survive a power cut.
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
// Where the file system has no locks, it holds none.
FileDescriptor lock_directory(const std::filesystem::path& path);

// A file or directory under construction beside its final place, named "<target>.<pid>.<random>.tmp" and locked as long
// as the process that made it lives. Destroying it removes what was not renamed away. A directory is Access::owner.
class Scratch {
 public:
  enum class Kind { file, directory };
  Scratch(const std::filesystem::path& target, Kind kind, Access access = Access::owner);
  Scratch(const Scratch&) = delete;
  ~Scratch();
  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return lock_.number(); }  // of a file: open for writing

 private:
  std::filesystem::path path_;
  FileDescriptor lock_;
};

// A new name beside `target`, which sweep_scratch() may remove as soon as no process holds its lock.
std::filesystem::path scratch_path(const std::filesystem::path& target);

// Removes from `directory` what a Scratch of a dead process left there. Does nothing when the directory is absent.
void sweep_scratch(const std::filesystem::path& directory);

// Throws the Error for a failed system call: `verb` is "read" or "write", `error` an errno.
[[noreturn]] void fail_file(std::string_view verb, const std::filesystem::path& path, int error);

}  // namespace hypermla
