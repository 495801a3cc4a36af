// One T for each process. After a fork the threads of the parent are not there, and its locks may be held by them: the
// child gets a T of its own at its next call, and leaves the parent's as it is, neither used nor destroyed.
#pragma once

#include <unistd.h>

#include <atomic>

namespace hypermla {

template <class T>
class PerProcess {
 public:
  ~PerProcess() {
    if (const Here* here = here_.load(); here->process == ::getpid()) delete here;
  }
  // Any thread may call it.
  T& get() {
    Here* here = here_.load();
    if (here->process == ::getpid()) return here->value;
    Here* fresh = new Here;
    if (here_.compare_exchange_strong(here, fresh)) return fresh->value;
    delete fresh;  // another thread of the child was first
    return here->value;
  }

 private:
  struct Here {
    pid_t process = ::getpid();
    T value;
  };
  std::atomic<Here*> here_ = new Here;
};

}  // namespace hypermla
