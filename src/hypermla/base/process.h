// Runs another program: a compiler, a profiler. No shell is involved, so arguments need no quoting.
#pragma once

#include <signal.h>

#include <chrono>
#include <map>
#include <stop_token>
#include <string>
#include <vector>

namespace hypermla {

struct ProcessOptions {
  std::map<std::string, std::string> environment = {};  // set on top of what this process has
  std::string input = {};                               // what the program reads from its standard input
  std::chrono::milliseconds timeout{0};                 // 0: as long as it takes
  std::stop_token stop = {};                            // ends the program by SIGTERM, with everything it had started
};

struct ProcessResult {
  int status = 0;          // exit code, or 128 + the signal that ended it
  bool timed_out = false;  // it was killed, with everything it had started, because the timeout passed
  std::string out;
  std::string err;
};

// argv[0] is a path or a name to be found on PATH. The program inherits no open file but its three standard ones.
// Throws Error when it cannot be started; that it failed is told by `status`.
ProcessResult run_process(const std::vector<std::string>& argv, const ProcessOptions& options = {});

// As a word of a shell's command, quoted where it needs to be.
std::string shell_word(const std::string& text);

// A stack for the handlers of the calling thread's signals, as long as this lives: where its own has overflowed there
// is no room for one.
class SignalStack {
 public:
  SignalStack() {
    const stack_t stack = {.ss_sp = memory_.data(), .ss_flags = 0, .ss_size = memory_.size()};
    ::sigaltstack(&stack, nullptr);
  }
  ~SignalStack() {
    const stack_t none = {.ss_sp = nullptr, .ss_flags = SS_DISABLE, .ss_size = 0};
    ::sigaltstack(&none, nullptr);
  }
  SignalStack(const SignalStack&) = delete;
  SignalStack& operator=(const SignalStack&) = delete;

 private:
  std::vector<char> memory_ = std::vector<char>(1 << 16);
};

// Ends every program that run_process() is waiting for, with everything it had started; none is started after it. For a
// process that is about to end.
void end_programs();

}  // namespace hypermla
