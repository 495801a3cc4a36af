// The threads of a CUDA thread block as contexts of one thread of the system: one runs until it waits for others, then
// one goes on that waits no more. Which one, a seed decides: in most steps the first of an order of the warps, so that
// some run ahead as far as they may.
//
// The two blocks of a cluster take turns, which end where a block cannot go on, and before that at random: after few
// steps or after so many that it is as far ahead of the other as it may. What one does to the other happens in a turn
// of the other, as late as may be and in any order.
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
#include <utility>
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
  // Those of the block that has its turn.
  static Threads& all() { return *running_; }
  int count() const { return count_; }

  // Runs `work` as threads 0 .. count - 1 of a block, or of both blocks of a cluster, and returns when all have ended.
  // `change_places` is called between two turns: what a block has and there is but once, the other has from there on.
  static void run(int count, unsigned seed, const std::function<void()>& work,
                  const std::function<void()>& change_places = {}) {
    static Threads blocks[2];
    for (Threads& one : blocks) one.other_ = change_places ? &blocks[&one == blocks] : nullptr;
    change_places_ = &change_places;
    running_ = blocks;
    for (Threads& one : blocks)
      if (&one == blocks || change_places) one.begin(count, seed + 7919u * (&one != blocks), work);
    if (change_places && blocks[1].random_() % 2) change();
    Thread& first = next();
    first.begun = true;
    swapcontext(&caller_, &first.begin);
  }
  // Of a cluster. Whether it still runs, and what it finds in one of its turns.
  Threads& other() const { return *other_; }
  bool runs() const { return left_ > 0; }
  void post(std::function<void()> arrives) { mail_.push_back(std::move(arrives)); }
  static int late() { return late_; }  // blocks that ended before all had arrived, since the program began

  // Of the running thread: until another thread wakes it. `place` is where it waits, for a message.
  [[gnu::noinline]] void wait(const char* place, unsigned which) {
    Thread& own = *threads_[thread.x];
    own.place = place;
    own.which = which;
    Thread& to = next();
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

  void begin(int count, unsigned seed, const std::function<void()>& work) {
    work_ = &work;
    count_ = left_ = count;
    turn_ = 2;
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
  }
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
    if (--left_ == 0) {
      if (!mail_.empty()) {
        std::fprintf(stderr, "thread block %d ends before all that the other sends has arrived\n", block.x);
        ++late_;
        mail_.clear();
      }
      if (!other_ || !other_->runs()) setcontext(&caller_);
    }
    go_to(next());
  }
  // The thread that goes on; it is `thread` from here on.
  static Thread& next() {
    for (;;) {
      Threads* own = running_;
      if (own->other_) {
        if ((!own->runs() || own->random_() % own->turn_ == 0) && own->other_->can_go_on()) own = change();
        if (!own->mail_.empty() && own->random_() % 4 == 0) own->receive();
      }
      if (std::vector<int>* const of = own->ready()) return own->take(*of);
      if (!own->mail_.empty()) {
        own->receive();
      } else if (own->other_ && own->other_->can_go_on()) {
        change();
      } else {
        own->stop("its threads wait for ever" + own->waiting() +
                  (own->other_ ? "\nthread block " + std::to_string(block.x ^ 1) + " beside it" + own->other_->waiting()
                               : ""));
      }
    }
  }
  // Those of a warp, of which one goes on; null: none can.
  std::vector<int>* ready() {
    if (random_() % 8 == 0) {
      std::vector<int>& of = ready_[random_() % ready_.size()];
      if (!of.empty()) return &of;
    }
    for (const int warp : order_)
      if (!ready_[warp].empty()) return &ready_[warp];
    return nullptr;
  }
  Thread& take(std::vector<int>& of) {
    std::swap(of[random_() % of.size()], of.back());
    thread.x = of.back();
    of.pop_back();
    stack = threads_[thread.x]->stack.get();
    return *threads_[thread.x];
  }
  bool can_go_on() const {
    return runs() &&
           (!mail_.empty() || std::any_of(ready_.begin(), ready_.end(), [](auto& of) { return !of.empty(); }));
  }
  static Threads* change() {
    running_ = running_->other_;
    (*change_places_)();
    running_->turn_ = 2 << running_->random_() % 4 * 3;
    return running_;
  }
  // Some of what the other block has sent.
  void receive() {
    for (std::size_t count = 1 + random_() % mail_.size(); count > 0; --count) {
      std::swap(mail_[random_() % mail_.size()], mail_.back());
      const std::function<void()> arrives = std::move(mail_.back());
      mail_.pop_back();
      arrives();
    }
  }
  [[noreturn]] static void go_to(Thread& other) {
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
  const std::function<void()>* work_ = nullptr;
  int count_ = 0, left_ = 0;

  Threads* other_ = nullptr;                 // of the other block of a cluster
  std::vector<std::function<void()>> mail_;  // from it
  unsigned turn_ = 2;                        // after so many steps it is the other's, on average
  static inline ucontext_t caller_;
  static inline Threads* running_ = nullptr;
  static inline int late_ = 0;
  static inline const std::function<void()>* change_places_ = nullptr;
};

}  // namespace emulated
