// The threads that run blocks. They start once and sleep between launches; a block is taken from an atomic counter.
#pragma once

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace cuda::tiles::host {

class Pool {
 public:
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Cores that this process may use.
  static int cores() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  }

  // run(i) for every i below count, on `threads` threads (0: one per core). After the first exception no further block
  // starts; its message is returned, else null. The text lives until the next call.
  const char* run(std::uint64_t count, int threads, std::function<void(std::uint64_t)> run) {
    std::lock_guard one_launch(launch_);
    std::unique_lock lock(mutex_);
    job_ = std::move(run);
    count_ = count;
    next_ = 0;
    error_.clear();
    workers_ = threads > 0 ? threads : cores();
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
    return error_.empty() ? nullptr : error_.c_str();
  }

 private:
  void work(int number, std::uint64_t seen) {
    for (std::unique_lock lock(mutex_);;) {
      wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
      if (number >= workers_) continue;
      lock.unlock();
      std::string error;
      for (std::uint64_t i; (i = next_++) < count_;) {
        try {
          job_(i);
        } catch (const std::exception& e) {
          error = e.what();
        } catch (...) {
          error = "a kernel threw something that is no std::exception";
        }
        if (!error.empty()) {
          next_ = count_;
          break;
        }
      }
      lock.lock();
      if (error_.empty()) error_ = error;
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex launch_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  std::function<void(std::uint64_t)> job_;
  std::atomic<std::uint64_t> next_ = 0;
  std::uint64_t count_ = 0, generation_ = 0;
  int workers_ = 0, running_ = 0;
  bool stop_ = false;
  std::string error_;
};

}  // namespace cuda::tiles::host
