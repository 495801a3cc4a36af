// The threads that run the blocks of kernels on the CPU. They start once and sleep between launches; each takes its
// next block from an atomic counter.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "hypermla/base/per_process.h"
#include "hypermla/base/process.h"

namespace hypermla {

class Workers {
 public:
  ~Workers() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Calls run(i) for every i below `count`, on `threads` threads. run() returns null or an error; after the first error
  // no further block starts. Returns that error, or an empty text. What run() throws, as where memory is short, is
  // thrown here.
  std::string run(std::uint64_t count, int threads, std::function<const char*(std::uint64_t)> run) {
    std::lock_guard one_launch(launch_);
    std::unique_lock lock(mutex_);
    job_ = std::move(run);
    count_ = count;
    next_ = 0;
    error_.clear();
    workers_ = threads;
    try {
      while (static_cast<int>(threads_.size()) < workers_) {
        threads_.emplace_back(
            [this, number = static_cast<int>(threads_.size()), seen = generation_] { work(number, seen); });
      }
    } catch (const std::system_error&) {  // the system gives no more threads: those that there are do the work
      workers_ = static_cast<int>(threads_.size());
      if (workers_ == 0) return "the system refused to start a thread";
    }
    running_ = workers_;
    ++generation_;
    wake_.notify_all();
    done_.wait(lock, [&] { return running_ == 0; });
    if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
    return error_;
  }

 private:
  void work(int number, std::uint64_t seen) {
    const SignalStack stack;  // a kernel may need more than this thread's
    for (std::unique_lock lock(mutex_);;) {
      wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
      if (number >= workers_) continue;
      lock.unlock();
      std::string error;
      std::exception_ptr thrown;
      try {
        for (std::uint64_t i; (i = next_++) < count_;) {
          if (const char* message = job_(i)) {
            error = message;
            next_ = count_;
            break;
          }
        }
      } catch (...) {
        thrown = std::current_exception();
        next_ = count_;
      }
      lock.lock();
      if (error_.empty()) error_ = error;
      if (!thrown_) thrown_ = thrown;
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex launch_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  std::function<const char*(std::uint64_t)> job_;
  std::atomic<std::uint64_t> next_ = 0;
  std::uint64_t count_ = 0, generation_ = 0;
  int workers_ = 0, running_ = 0;
  bool stop_ = false;
  std::string error_;
  std::exception_ptr thrown_;
};

// The workers of this process: a forked child starts its own.
class Pool {
 public:
  std::string run(std::uint64_t count, int threads, std::function<const char*(std::uint64_t)> run) {
    return workers_.get().run(count, threads, std::move(run));
  }

 private:
  PerProcess<Workers> workers_;
};

}  // namespace hypermla
