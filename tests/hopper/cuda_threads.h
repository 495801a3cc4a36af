// The threads of a CUDA thread block as contexts of one thread of the system: one runs until it waits for others, then
// one goes on that waits no more. Which one, a seed decides: in most steps the first of an order of the warps, so that
// some run ahead as far as they may.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace emulated {

struct Index {
  int x = 0;
};
inline Index thread, block, grid;
inline const char* stack;  // of the running thread
inline constexpr std::size_t kStackBytes = 256 << 10;

class Threads {
 public:
  static Threads& all() {
    static Threads threads;
    return threads;
  }
  int count() const { return count_; }

  // Runs `work` as threads 0 .. count - 1 and returns when all have ended.
  void run(int count, unsigned seed, const std::function<void()>& work) {
    work_ = &work;
    count_ = left_ = count;
    random_.seed(seed);
    ready_.assign((count + 31) / 32, {});
    order_.resize(ready_.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::shuffle(order_.begin(), order_.end(), random_);
    while (int(threads_.size()) < count) threads_.push_back(std::make_unique<Thread>());
    for (int i = 0; i < count; ++i) {
      prepare(*threads_[i]);
      wake(i);
    }
    const int first = next();
    threads_[first]->begun = true;
    swapcontext(&caller_, &threads_[first]->begin);
  }
  // Of the running thread: until another thread wakes it. `place` is where it waits, for a message.
  [[gnu::noinline]] void wait(const char* place, unsigned which) {
    Thread& own = *threads_[thread.x];
    own.place = place;
    own.which = which;
    const int to = next();
    if (!_setjmp(own.jump)) go_to(to);
  }
  void wake(int waiting) { ready_[waiting / 32].push_back(waiting); }

  [[noreturn]] void stop(const std::string& why) const {
    std::fprintf(stderr, "thread block %d: %s\n", block.x, why.c_str());
    std::abort();
  }

 private:
  struct Thread {
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    ucontext_t begin;
    jmp_buf jump;
    bool begun = false;
    const char* place = "";
    unsigned which = 0;
  };

  [[gnu::noinline]] static void prepare(Thread& one) {
    getcontext(&one.begin);
    one.begin.uc_stack.ss_sp = one.stack.get();
    one.begin.uc_stack.ss_size = kStackBytes;
    one.begin.uc_link = nullptr;
    makecontext(
        &one.begin, [] { all().run_one(); }, 0);
    one.begun = false;
  }
  void run_one() {
    (*work_)();
    threads_[thread.x]->place = nullptr;
    if (--left_ == 0) setcontext(&caller_);
    go_to(next());
  }
  // The thread that goes on; it is `thread` from here on.
  int next() {
    std::vector<int>* of = nullptr;
    if (random_() % 8 == 0) {
      of = &ready_[random_() % ready_.size()];
      if (of->empty()) of = nullptr;
    }
    for (std::size_t i = 0; !of && i < order_.size(); ++i)
      if (!ready_[order_[i]].empty()) of = &ready_[order_[i]];
    if (!of) stop("its threads wait for ever" + waiting());
    std::swap((*of)[random_() % of->size()], of->back());
    thread.x = of->back();
    of->pop_back();
    stack = threads_[thread.x]->stack.get();
    return thread.x;
  }
  [[noreturn]] void go_to(int to) {
    Thread& other = *threads_[to];
    if (other.begun) _longjmp(other.jump, 1);
    other.begun = true;
    setcontext(&other.begin);
    std::abort();
  }
  std::string waiting() const {
    std::string result;
    for (int i = 0, first = 0; i < count_; ++i) {
      const Thread &one = *threads_[i], *behind = i + 1 < count_ ? threads_[i + 1].get() : nullptr;
      if (behind && behind->place == one.place && behind->which == one.which) continue;
      if (one.place) {
        result += "\n  threads " + std::to_string(first) + " to " + std::to_string(i) + " at " + one.place + " " +
                  std::to_string(one.which);
      }
      first = i + 1;
    }
    return result;
  }

  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<std::vector<int>> ready_;  // by warp
  std::vector<int> order_;               // of the warps
  std::minstd_rand random_;
  ucontext_t caller_;
  const std::function<void()>* work_ = nullptr;
  int count_ = 0, left_ = 0;
};

}  // namespace emulated
