#include "hypermla/cli/signals.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <thread>

#include "hypermla/base/error.h"
#include "hypermla/base/process.h"

namespace hypermla {
namespace {

// No string, for what crashed may have broken the heap.
char last_words[4096];
std::atomic<std::size_t> last_length{0};

extern "C" [[noreturn]] void say_last_words(int) {
  static std::atomic_flag said;
  while (said.test_and_set()) ::pause();  // another thread says it, and ends all
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, last_words, last_length);
  ::_exit(2);
}

}  // namespace

void end_as_crashed() { say_last_words(0); }

void say_where_it_crashes(const std::string& sentence) {
  const std::string line = "hypermla: " + sentence.substr(0, sizeof last_words - 16) + "\n";
  last_length = 0;
  std::copy(line.begin(), line.end(), last_words);
  last_length = line.size();
  static const bool once = [] {
    static const SignalStack stack;
    std::fflush(stdout);
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // what is said before it crashes is out
    struct sigaction action = {};
    action.sa_handler = say_last_words;
    action.sa_flags = SA_ONSTACK;  // the thread's own may be what overflowed
    for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) ::sigaction(number, &action, nullptr);
    return true;
  }();
  (void)once;
}

void end_programs_with_this_one() {
  ::signal(SIGXFSZ, SIG_IGN);  // a file that grows too large is an error of its write, which says what to do
  sigset_t signals;
  sigemptyset(&signals);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    struct sigaction present {};
    ::sigaction(number, nullptr, &present);
    if (present.sa_handler != SIG_IGN) sigaddset(&signals, number);  // nohup ignores, and so does a shell's `&`
  }
  // All threads inherit the mask, so the signals come to the one that waits for them, where any code may run.
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread([signals] {
    int number = 0;
    if (::sigwait(&signals, &number) != 0) return;
    end_programs();
    ::signal(number, SIG_DFL);
    ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    ::raise(number);
  }).detach();
}

void end_with_the_caller(int caller) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != caller) fail("the program that asked for this has ended (process {})", caller);
}

}  // namespace hypermla
