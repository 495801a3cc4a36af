#include "hypermla/base/files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <random>
#include <system_error>
#include <utility>

#include "hypermla/base/error.h"
#include "hypermla/base/pattern.h"

namespace hypermla {
namespace {
namespace fs = std::filesystem;

FileDescriptor open_file(const fs::path& path, int flags) {
  int number;
  do number = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  while (number < 0 && errno == EINTR);
  return FileDescriptor(number);
}

FileDescriptor create_file(const fs::path& path, Access access) {
  const mode_t mode = access == Access::owner ? 0600 : 0666;
  FileDescriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
  if (file && access == Access::owner) ::fchmod(file.number(), mode);  // a umask may have taken the owner's own rights
  return file;
}

bool create_directory(const fs::path& path, Access access) {
  const mode_t mode = access == Access::owner ? 0700 : 0777;
  if (::mkdir(path.c_str(), mode) != 0) return false;
  if (access == Access::owner) ::chmod(path.c_str(), mode);
  return true;
}

bool trusted(const struct stat& status) {
  return (status.st_uid == ::geteuid() || status.st_uid == 0) && !(status.st_mode & (S_IWGRP | S_IWOTH));
}

// Whether nobody may write it but who may write that file, or its directory, where it can be replaced.
bool only_writers_of(const fs::path& image, const struct stat& status) {
  for (const fs::path& at : {image, image.parent_path()}) {
    struct stat own {};
    if (at.empty() || ::stat(at.c_str(), &own) != 0) continue;
    const bool of_owner = status.st_uid == own.st_uid || status.st_uid == ::geteuid() || status.st_uid == 0;
    const bool writes = (own.st_mode & S_IWGRP) && !(own.st_mode & S_ISVTX);  // who may not replace others' files
    const bool of_group = !(status.st_mode & S_IWGRP) || (writes && status.st_gid == own.st_gid);
    if (of_owner && of_group && !(status.st_mode & S_IWOTH)) return true;
  }
  return false;
}

// Writes and syncs; returns an errno, 0 for success.
int write_all(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(descriptor, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
  return ::fsync(descriptor) == 0 ? 0 : errno;
}

// 0, or an errno: EWOULDBLOCK when another process holds it, another value when the file system has no locks.
int lock(int descriptor, int operation) {
  int result;
  do result = ::flock(descriptor, operation);
  while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

// Whether a name belongs to a Scratch whose process is dead. The lock shows that. Only where there are no locks the
// process number decides, since numbers are reused and differ between containers. `held` keeps the lock while the
// caller removes the file.
bool abandoned(const fs::path& path, FileDescriptor& held) {
  static const Pattern pattern(R"(.*\.(\d{1,10})\.[0-9a-f]{16}\.tmp)");
  const std::optional<Pattern::Found> match = pattern.match(path.filename().string());
  if (!match) return false;
  held = open_file(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  if (!held) return false;
  const int error = lock(held.number(), LOCK_EX | LOCK_NB);
  if (error == 0 || error == EWOULDBLOCK) return error == 0;
  return ::kill(static_cast<pid_t>(std::stoll(match->groups[1])), 0) != 0 && errno == ESRCH;
}

}  // namespace

void fail_file(std::string_view verb, const fs::path& path, int error) {
  const std::string reason = std::generic_category().message(error);
  std::string_view advice = "check the path and the state of its disk, then try again";
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      advice = "check the path";
      break;
    case EISDIR:
      advice = "give the path of a file";
      break;
    case ENOSPC:
    case EDQUOT:
      advice = "free some space or choose another directory";
      break;
    case EFBIG:
      advice = "raise the file size limit of this process (ulimit -f) or choose another directory";
      break;
    case EROFS:
    case EACCES:
    case EPERM:
      advice = "change its permissions or choose another directory";
      break;
    case EMFILE:
    case ENFILE:
      advice = "raise the limit of open files (ulimit -n)";
      break;
  }
  fail("could not {} '{}' ({}); {}", verb, path.string(), reason, advice);
}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (number_ >= 0) ::close(number_);
}

bool trusted(const fs::path& path, const fs::path& image) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 && !S_ISLNK(status.st_mode) &&
         (trusted(status) || only_writers_of(image, status));
}

void require_trusted(const fs::path& path, std::string_view advice, const fs::path& image) {
  constexpr const char* kDanger = "they could put code there that would run as you";
  std::error_code ignored;
  const fs::path real = fs::weakly_canonical(path, ignored);
  struct stat status {};
  if (::stat(real.c_str(), &status) == 0 && !trusted(status) && !only_writers_of(image, status)) {
    if (status.st_uid != ::geteuid() && status.st_uid != 0)
      fail("'{}' belongs to another user (uid {}) and is not used, because {}; {}", path.string(), status.st_uid,
           kDanger, advice);
    fail("'{}' may be written by other users and is not used, because {}; run `chmod -R go-w '{}'`", path.string(),
         kDanger, path.string());
  }
  if (const fs::path above = open_above(path); !above.empty())
    fail("'{}' is not used, because all users may write '{}': {}; choose another directory, or run `chmod o-w '{}'`",
         path.string(), above.string(), kDanger, above.string());
}

fs::path open_above(const fs::path& path) {
  std::error_code ignored;
  for (fs::path at = fs::weakly_canonical(path, ignored); at.has_relative_path();) {
    at = at.parent_path();
    struct stat status {};
    if (::stat(at.c_str(), &status) == 0 && (status.st_mode & S_IWOTH) && !(status.st_mode & S_ISVTX)) return at;
  }
  return {};
}

std::string read_file(const fs::path& path) {
  const FileDescriptor file = open_file(path, O_RDONLY | O_NONBLOCK);  // which a pipe without a writer needs
  if (!file) fail_file("read", path, errno);
  struct stat status {};
  if (::fstat(file.number(), &status) != 0) fail_file("read", path, errno);
  if (S_ISDIR(status.st_mode)) fail_file("read", path, EISDIR);
  if (!S_ISREG(status.st_mode)) fail("'{}' is not a regular file; give the path of one", path.string());
  std::string bytes;
  bytes.reserve(static_cast<std::size_t>(status.st_size));
  char block[1 << 16];
  for (;;) {
    const ssize_t count = ::read(file.number(), block, sizeof block);
    if (count == 0) return bytes;
    if (count > 0) bytes.append(block, static_cast<std::size_t>(count));
    if (count < 0 && errno != EINTR) fail_file("read", path, errno);
  }
}

void write_file_atomic(const fs::path& name, std::string_view bytes, Access access) {
  fs::path path = name;
  std::error_code unreadable;
  for (int links = 0; fs::is_symlink(path, unreadable) && links < 40; ++links)
    path = path.parent_path() / fs::read_symlink(path, unreadable);
  const Scratch scratch(path, Scratch::Kind::file, access);
  if (const int error = write_all(scratch.descriptor(), bytes)) fail_file("write", path, error);
  if (::rename(scratch.path().c_str(), path.c_str()) != 0) fail_file("write", path, errno);
  sync_directory(path.has_parent_path() ? path.parent_path() : fs::path("."));
}

void write_new_file(const fs::path& path, std::string_view bytes) {
  const FileDescriptor file = create_file(path, Access::owner);
  if (!file) fail_file("write", path, errno);
  if (const int error = write_all(file.number(), bytes)) fail_file("write", path, error);
}

void make_directories(const fs::path& path, Access access) {
  if (create_directory(path, access)) return;
  if (errno == ENOENT && path.has_relative_path() && path.has_parent_path()) {
    make_directories(path.parent_path(), access);
    if (create_directory(path, access)) return;
  }
  if (errno != EEXIST) fail_file("write", path, errno);
  std::error_code unreadable;  // is no directory for this user
  if (!fs::is_directory(path, unreadable)) fail_file("write", path, ENOTDIR);
}

void require_writable(const fs::path& path) {
  std::error_code unreadable;  // is as good as absent
  fs::path present = path;
  while (!present.empty() && present != present.parent_path() && !fs::exists(present, unreadable)) {
    struct stat link {};
    if (::lstat(present.c_str(), &link) != 0) {
      if (errno == ENAMETOOLONG) fail_file("write", path, errno);
    } else if (S_ISLNK(link.st_mode)) {
      fail("'{}' is a link to nothing; remove it, or choose another path", present.string());
    }
    present = present.parent_path();
  }
  if (present.empty()) present = ".";
  if (!fs::is_directory(present, unreadable)) fail_file("write", path, ENOTDIR);
  // Only a file that was made proves it: root may write everywhere by its rights, yet not in /proc.
  const fs::path probe = scratch_path(present / "probe");
  const FileDescriptor made = create_file(probe, Access::owner);
  if (!made) fail_file("write", path, errno);
  fs::remove(probe, unreadable);
}

void sync_directory(const fs::path& path) {
  const FileDescriptor directory = open_file(path, O_RDONLY | O_DIRECTORY);
  if (!directory) fail_file("write", path, errno);
  // Some file systems cannot sync a directory and say so by EINVAL; their renames are as durable as they get.
  if (::fsync(directory.number()) != 0 && errno != EINVAL) fail_file("write", path, errno);
}

FileDescriptor lock_directory(const fs::path& path) {
  FileDescriptor directory = open_file(path, O_RDONLY | O_DIRECTORY);
  if (directory) lock(directory.number(), LOCK_EX);
  return directory;
}

fs::path scratch_path(const fs::path& target) {
  std::random_device random;
  return fmt::format("{}.{}.{:08x}{:08x}.tmp", target.string(), ::getpid(), random(), random());
}

Scratch::Scratch(const fs::path& target, Kind kind, Access access) {
  // Another process may sweep the file away between its creation and its lock: then try again.
  for (struct stat status{}; status.st_nlink == 0;) {
    path_ = scratch_path(target);
    if (kind == Kind::directory && !create_directory(path_, Access::owner)) fail_file("write", target, errno);
    lock_ = kind == Kind::directory ? open_file(path_, O_RDONLY | O_DIRECTORY) : create_file(path_, access);
    if (!lock_ && kind == Kind::directory && errno == ENOENT) continue;
    if (!lock_) fail_file("write", target, errno);
    lock(lock_.number(), LOCK_EX);
    if (::fstat(lock_.number(), &status) != 0) fail_file("write", target, errno);
  }
}

Scratch::~Scratch() {
  std::error_code ignored;  // what cannot be removed now is swept later
  fs::remove_all(path_, ignored);
}

void sweep_scratch(const fs::path& directory) {
  std::error_code error;
  for (fs::directory_iterator item(directory, error), end; !error && item != end; item.increment(error)) {
    FileDescriptor held;
    std::error_code ignored;  // a read-only directory keeps its leftovers
    if (abandoned(item->path(), held)) fs::remove_all(item->path(), ignored);
  }
}

}  // namespace hypermla
