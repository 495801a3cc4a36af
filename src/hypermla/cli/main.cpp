#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <new>
#include <stdexcept>
#include <system_error>

#include "hypermla/base/error.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/signals.h"
#include "hypermla/version.h"

namespace {

struct Command {
  const char* name;
  const char* summary;  // empty: not for users
  std::function<int(const hypermla::Words&)> run;
};

const Command kCommands[] = {
    {"kernel", "run, tune, check and profile one kernel: hypermla kernel <kernel> [version] [flags]",
     hypermla::kernel_command},
    {"predict", "roofline time of a kernel on every known device, without running it", hypermla::predict_command},
    {"choose", "which kernel, and how many decompressed tokens, for a problem", hypermla::choose_command},
    {"clone", "begin a new version of a kernel as a copy of another", hypermla::clone_command},
    {"compile", "compile kernels ahead of time, for any GPU, without one", hypermla::compile_command},
    {"verify", "run the correctness cases on this device and record the result", hypermla::verify_command},
    {"verify-file", "check a stand-alone kernel file against the reference in it", hypermla::verify_file_command},
    {"bench-file", "time a stand-alone kernel file against this device's ceilings", hypermla::bench_file_command},
    {"compare", "two profiles: is the second SAME, FASTER or SLOWER, and what changed", hypermla::compare_command},
    {"kb", "knowledge cards: list, show, match a profile, lint, add", hypermla::kb_command},
    {"next", "what bounds a kernel and the task for its next version, from a profile", hypermla::next_command},
    {"devlog", "development logs: add a version's entry from its profile, lint", hypermla::devlog_command},
    {"device", "what was found: devices, driver, toolchain; --measure adds this machine", hypermla::device_command},
    {"compile-job", "", hypermla::compile_job_command},
};

std::string usage() {
  std::string text =
      "HyperMLA: Multi-head Latent Attention kernels, and the framework they are written, tuned and checked in.\n\n"
      "Usage: hypermla <command> [arguments]      hypermla <command> --help      hypermla --list\n\nCommands:\n";
  for (const Command& command : kCommands)
    if (*command.summary) text += fmt::format("  {:<11} {}\n", command.name, command.summary);
  text +=
      "\nOptions:\n  --list     all kernels and versions\n  --version  the version of this program\n  --help     this "
      "text\n";
  return text;
}

int run(const hypermla::Words& words) {
  for (const std::string& word : words)
    if (word.empty())
      hypermla::fail("an argument is empty, as that of a shell's variable which is not set; leave it out or give it");
  const std::string first = words.empty() ? "--help" : words.front();
  auto asks = [](const std::string& word) { return word == "--help" || word == "-h" || word == "help"; };
  const bool help = asks(first);
  if (help && words.size() == 2 && !asks(words[1])) return run({words[1], "--help"});
  if ((help || first == "--version" || first == "--list") && words.size() > 1)
    hypermla::fail("'{}' is not expected here; see hypermla --help", words.back());
  if (help) return std::fputs(usage().c_str(), stdout), 0;
  if (first == "--version") return std::puts("hypermla " HYPERMLA_VERSION), 0;
  if (first == "--list") return hypermla::list_command();
  std::vector<std::string> names = {"--list", "--version", "--help"};
  for (const Command& command : kCommands) {
    if (first == command.name) return command.run({words.begin() + 1, words.end()});
    // A kernel may be named in full: `hypermla kernel.cutile.mla.flash_attention v1`.
    if (first.rfind("kernel.", 0) == 0 && std::string(command.name) == "kernel") {
      hypermla::Words rest(words.begin() + 1, words.end());
      rest.insert(rest.begin(), first.substr(7));
      return command.run(rest);
    }
    if (*command.summary) names.push_back(command.name);
  }
  hypermla::fail("unknown command '{}'; did you mean {}? `hypermla --help` lists all", first,
                 hypermla::nearest(first, names));
}

}  // namespace

int main(int argc, char** argv) {
  // Where a standard stream is closed the next file that is opened would be it, and get what is said.
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) < 0) ::open("/dev/null", O_RDWR);
  hypermla::end_programs_with_this_one();
  try {
    const int status = run({argv + 1, argv + argc});
    // What was printed may still lie in the buffer, and the disk may be full.
    if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return status;
    hypermla::print_error(
        fmt::format("hypermla: could not write the output ({})\n", std::generic_category().message(errno)));
  } catch (const std::bad_alloc&) {
    std::fputs("hypermla: out of memory; choose a smaller problem\n", stderr);
  } catch (const std::length_error&) {  // more than a vector can hold
    std::fputs("hypermla: out of memory; choose a smaller problem\n", stderr);
  } catch (const std::exception& error) {
    hypermla::print_error(fmt::format("hypermla: {}\n", error.what()));
  }
  return 2;
}
