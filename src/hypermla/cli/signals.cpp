#include "hypermla/cli/signals.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <thread>

#include "hypermla/base/error.h"
#include "hypermla/base/process.h"

namespace hypermla {

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
