#include "hypermla/base/process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/per_process.h"

namespace hypermla {
namespace {

// The standard files of the program are files in memory, not pipes. So no thread has to read while it writes, no full
// pipe blocks it, and a child that outlives it cannot keep this process waiting for the end of a file.
FileDescriptor memory_file(std::string_view contents = {}) {
  const FileDescriptor low(::memfd_create("hypermla", MFD_CLOEXEC));
  // Clear of 0 to 2 even where those are closed.
  FileDescriptor file(low ? ::fcntl(low.number(), F_DUPFD_CLOEXEC, 3) : -1);
  bool written = static_cast<bool>(file);
  while (written && !contents.empty()) {
    const ssize_t count = ::write(file.number(), contents.data(), contents.size());
    if (count > 0) contents.remove_prefix(static_cast<std::size_t>(count));
    written = count > 0 || errno == EINTR;
  }
  if (!written || ::lseek(file.number(), 0, SEEK_SET) != 0) fail_file("write", "a file in memory", errno);
  return file;
}

std::string contents_of(const FileDescriptor& file) {
  std::string bytes;
  char block[1 << 14];
  ssize_t count = 0;
  while ((count = ::pread(file.number(), block, sizeof block, static_cast<off_t>(bytes.size()))) > 0) {
    bytes.append(block, static_cast<std::size_t>(count));
  }
  return bytes;
}

std::vector<std::string> environment_with(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> entries;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text(*entry);
    if (!changes.count(text.substr(0, text.find('=')))) entries.push_back(text);
  }
  for (const auto& [name, value] : changes) entries.push_back(name + "=" + value);
  return entries;
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& text : strings) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

pid_t spawn(const std::vector<std::string>& argv, const std::vector<std::string>& environment, int in, int out,
            int err) {
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, in, 0);
  posix_spawn_file_actions_adddup2(&files, out, 1);
  posix_spawn_file_actions_adddup2(&files, err, 2);
  posix_spawn_file_actions_addclosefrom_np(&files, 3);

  // The program gets its own process group, so that a timeout also ends the processes that a compiler driver started.
  // It gets default signals, since Python ignores SIGPIPE and the program would inherit that.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setpgroup(&attributes, 0);
  sigset_t none, defaults;
  sigemptyset(&none);
  sigemptyset(&defaults);
  for (const int signal : {SIGPIPE, SIGINT, SIGTERM, SIGCHLD, SIGXFSZ}) sigaddset(&defaults, signal);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);

  pid_t pid = -1;
  const int error =
      ::posix_spawnp(&pid, argv[0].c_str(), &files, &attributes, pointers(argv).data(), pointers(environment).data());
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) {
    fail("could not start '{}' ({}); install it, or give the path where it is", argv[0],
         std::generic_category().message(error));
  }
  return pid;
}

// The programs that run now, each of which leads a process group. The lock is held while one starts, so that
// end_programs() misses none. Those of a process are not a forked child's, which would end them with itself.
struct Running {
  std::mutex mutex;
  std::set<pid_t> programs;
  bool ending = false;
};
Running& running() {
  static auto* const instance = new PerProcess<Running>;  // for good: threads may wait for programs until the end
  return instance->get();
}

// The wait status, and whether the timeout ended the program.
std::pair<int, bool> wait(pid_t pid, const std::string& name, std::chrono::milliseconds timeout,
                          const std::stop_token& stop) {
  using namespace std::chrono_literals;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  bool timed_out = false, stopped = false;
  auto pause = 500us;
  for (int status = 0;;) {
    const bool timed = timeout.count() > 0 && !timed_out, watch = timed || (stop.stop_possible() && !stopped);
    const pid_t ended = ::waitpid(pid, &status, watch ? WNOHANG : 0);
    if (ended == pid) return {status, timed_out};
    if (ended < 0 && errno != EINTR) {
      fail("could not learn how '{}' ended ({}); leave SIGCHLD at its default", name,
           std::generic_category().message(errno));
    }
    if (!watch) continue;
    if (stop.stop_requested() && !stopped) {
      stopped = true;
      ::kill(-pid, SIGTERM);
    } else if (timed && std::chrono::steady_clock::now() >= deadline) {
      timed_out = true;
      ::kill(-pid, SIGKILL);
    } else {
      std::this_thread::sleep_for(pause);
      pause = std::min<std::chrono::microseconds>(pause * 2, 10ms);
    }
  }
}

}  // namespace

ProcessResult run_process(const std::vector<std::string>& argv, const ProcessOptions& options) {
  if (argv.empty()) fail("there is no program to run; give its path as the first argument");
  const FileDescriptor in = memory_file(options.input), out = memory_file(), err = memory_file();
  const std::vector<std::string> environment = environment_with(options.environment);
  struct Listed {
    pid_t pid;
    ~Listed() {
      std::lock_guard lock(running().mutex);
      running().programs.erase(pid);
    }
  };
  auto start = [&]() -> Listed {
    std::lock_guard lock(running().mutex);
    if (running().ending) fail("'{}' is not started, since this process is about to end", argv[0]);
    const pid_t pid = spawn(argv, environment, in.number(), out.number(), err.number());
    running().programs.insert(pid);
    return {pid};
  };
  const Listed program = start();
  const auto [status, timed_out] = wait(program.pid, argv[0], options.timeout, options.stop);
  const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return {code, timed_out, contents_of(out), contents_of(err)};
}

std::string shell_word(const std::string& text) {
  if (!text.empty() &&
      text.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+./=,:") ==
          std::string::npos)
    return text;
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

void end_programs() {
  std::lock_guard lock(running().mutex);
  running().ending = true;
  for (const pid_t program : running().programs) ::kill(-program, SIGTERM);
}

}  // namespace hypermla
