// Stands in for kernels/cute/hopper/warpgroup.h, so that a kernel of one thread block without tensor work runs as plain
// C++: a context of its own for each CUDA thread, which goes on to the next one where it waits for others. Threads of
// the system would take twenty times as long.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

namespace device_threads {

struct Index {
  int x = 0;
};
inline Index index, block_index, grid;

// The threads of one block, one after the other.
class Block {
 public:
  explicit Block(int threads) : meeting_(threads), warps_(threads / 32, Barrier(32)), lanes_(threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back();
  }
  Block(const Block&) = delete;

  // `blocks` of them, one after the other.
  void run(int blocks, std::function<void()> work) {
    work_ = std::move(work);
    present() = this;
    grid.x = blocks;
    for (block_index.x = 0; block_index.x < blocks; ++block_index.x) {
      for (Thread& thread : threads_) {
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = kStackBytes;
        thread.context.uc_link = nullptr;
        makecontext(
            &thread.context, [] { present()->work_one(); }, 0);
        thread.begun = thread.done = false;
      }
      left_ = int(threads_.size());
      index.x = 0;
      threads_[0].begun = true;
      swapcontext(&caller_, &threads_[0].context);
    }
  }
  void meet() { wait(meeting_); }
  // How many threads of the block vote for it.
  int count(bool vote) {
    votes_ += vote;
    wait(meeting_);
    const int result = votes_;
    wait(meeting_);
    votes_ = 0;
    wait(meeting_);
    return result;
  }
  // What f makes of the values of the warp's 32 lanes.
  template <class F>
  int exchange(int value, F f) {
    Barrier& warp = warps_[index.x / 32];
    lanes_[index.x] = value;
    wait(warp);
    const int result = f(&lanes_[index.x / 32 * 32]);
    wait(warp);
    return result;
  }

  static Block*& present() {
    static Block* block;
    return block;
  }

 private:
  static constexpr std::size_t kStackBytes = 256 << 10;
  struct Thread {
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    ucontext_t context;  // where it begins
    jmp_buf place;       // where it waits
    bool begun = false, done = true;
  };
  struct Barrier {
    explicit Barrier(int of) : threads(of) {}
    int threads, arrived = 0, turn = 0;
  };

  void work_one() {
    work_();
    idle_ = 0;
    threads_[index.x].done = true;
    if (--left_ == 0)
      setcontext(&caller_);
    else
      next();
  }
  void wait(Barrier& barrier) {
    const int turn = barrier.turn;
    if (++barrier.arrived == barrier.threads) {
      barrier.arrived = idle_ = 0;
      ++barrier.turn;
    }
    while (barrier.turn == turn) next();
  }
  // Goes on with the next thread that is not done; returns when it is this one's turn again.
  void next() {
    if (++idle_ > 2 * int(threads_.size())) {
      std::fputs("threads wait for each other at different barriers\n", stderr);
      std::abort();
    }
    Thread& from = threads_[index.x];
    do index.x = (index.x + 1) % int(threads_.size());
    while (threads_[index.x].done);
    Thread& to = threads_[index.x];
    if (&from == &to || _setjmp(from.place)) return;  // swapcontext() would call the system, twice as slow in all
    if (to.begun) _longjmp(to.place, 1);
    to.begun = true;
    setcontext(&to.context);
  }

  Barrier meeting_;  // of the block's threads
  int votes_ = 0;
  std::vector<Barrier> warps_;
  std::vector<int> lanes_;
  std::vector<Thread> threads_;
  ucontext_t caller_;
  std::function<void()> work_;
  int left_ = 0, idle_ = 0;
};

}  // namespace device_threads

#define threadIdx ::device_threads::index
#define blockIdx ::device_threads::block_index
#define gridDim ::device_threads::grid

namespace hypermla::cute {

using std::max;
using std::min;
template <class T>
T& held_address(T& object) {
  return object;
}
inline void launch_next() {}
inline void wait_for_previous() {}
inline void __syncthreads() { device_threads::Block::present()->meet(); }
inline int __syncthreads_count(int vote) { return device_threads::Block::present()->count(vote != 0); }
inline int __syncthreads_or(int vote) { return __syncthreads_count(vote) > 0; }

template <class F>
int exchange(int value, F f) {
  return device_threads::Block::present()->exchange(value, f);
}
inline int __shfl_up_sync(unsigned, int value, int step) {
  const int lane = threadIdx.x % 32;
  return exchange(value, [=](const int* lanes) { return lanes[lane >= step ? lane - step : lane]; });
}
inline int __shfl_sync(unsigned, int value, int lane) {
  return exchange(value, [=](const int* lanes) { return lanes[lane]; });
}
inline float __shfl_sync(unsigned, float value, int lane) {
  return std::bit_cast<float>(__shfl_sync(~0u, std::bit_cast<int>(value), lane));
}
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  return __shfl_sync(~0u, value, threadIdx.x % 32 ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  return exchange(vote, [](const int* lanes) {
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i) votes |= unsigned(lanes[i] != 0) << i;
    return int(votes);
  });
}
inline bool __all_sync(unsigned, bool vote) { return __ballot_sync(~0u, vote) == ~0u; }
inline unsigned __match_any_sync(unsigned, int value) {
  const int lane = threadIdx.x % 32;
  return exchange(value, [=](const int* lanes) {
    unsigned those = 0;
    for (int i = 0; i < 32; ++i) those |= unsigned(lanes[i] == lanes[lane]) << i;
    return int(those);
  });
}
inline int __reduce_add_sync(unsigned, int value) {
  return exchange(value, [](const int* lanes) {
    int sum = 0;
    for (int i = 0; i < 32; ++i) sum += lanes[i];
    return sum;
  });
}
inline int __reduce_max_sync(unsigned, int value) {
  return exchange(value, [](const int* lanes) { return *std::max_element(lanes, lanes + 32); });
}
inline int __reduce_min_sync(unsigned, int value) {
  return exchange(value, [](const int* lanes) { return *std::min_element(lanes, lanes + 32); });
}
inline int __reduce_or_sync(unsigned, int value) {
  return exchange(value, [](const int* lanes) { return std::accumulate(lanes, lanes + 32, 0, std::bit_or<>()); });
}
inline void __syncwarp() {
  exchange(0, [](const int*) { return 0; });
}
inline float __fdividef(float x, float y) { return x / y; }
inline float reciprocal_fast(float x) { return 1.0f / x; }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(unsigned x) { return x ? std::countr_zero(x) + 1 : 0; }
inline int __clz(unsigned x) { return std::countl_zero(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline int atomicAdd(int* x, int more) { return std::atomic_ref(*x).fetch_add(more); }
inline int atomicMax(int* x, int value) {
  int before = std::atomic_ref(*x).load();
  while (before < value && !std::atomic_ref(*x).compare_exchange_weak(before, value)) {
  }
  return before;
}
inline int atomicOr(int* x, int bits) { return std::atomic_ref(*x).fetch_or(bits); }

}  // namespace hypermla::cute
