// Stands in for kernels/cute/hopper/warpgroup.h, so that a kernel of one thread block without tensor work runs as plain
// C++ threads: a thread for each CUDA thread, barriers for __syncthreads() and for the warp's exchanges.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
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
inline thread_local Index index;
inline Index block_index;

// The threads of one block. They live as long as it does, since starting them costs more than a small kernel.
class Block {
 public:
  explicit Block(int threads) : meeting_(threads), turn_(threads + 1), lanes_(threads) {
    for (int w = 0; w < threads / 32; ++w) warps_.push_back(std::make_unique<std::barrier<>>(32));
    for (int i = 0; i < threads; ++i)
      threads_.emplace_back([this, i] {
        index.x = i;
        for (;;) {
          turn_.arrive_and_wait();
          if (!work_) return;
          work_();
          turn_.arrive_and_wait();
        }
      });
    present() = this;
  }
  ~Block() {
    work_ = nullptr;
    turn_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }

  // `blocks` of them, one after the other.
  void run(int blocks, std::function<void()> work) {
    work_ = std::move(work);
    for (block_index.x = 0; block_index.x < blocks; ++block_index.x) {
      turn_.arrive_and_wait();
      turn_.arrive_and_wait();
    }
  }
  void meet() { meeting_.arrive_and_wait(); }
  // What f makes of the values of the warp's 32 lanes.
  template <class F>
  int exchange(int value, F f) {
    std::barrier<>& warp = *warps_[index.x / 32];
    lanes_[index.x] = value;
    warp.arrive_and_wait();
    const int result = f(&lanes_[index.x / 32 * 32]);
    warp.arrive_and_wait();
    return result;
  }

  static Block*& present() {
    static Block* block;
    return block;
  }

 private:
  std::barrier<> meeting_, turn_;  // of the block's threads; theirs with the caller
  std::vector<std::unique_ptr<std::barrier<>>> warps_;
  std::vector<int> lanes_;
  std::function<void()> work_;
  std::vector<std::thread> threads_;
};

}  // namespace device_threads

#define threadIdx ::device_threads::index
#define blockIdx ::device_threads::block_index

namespace hypermla::cute {

using std::max;
using std::min;
inline void launch_next() {}
inline void wait_for_previous() {}
inline void __syncthreads() { device_threads::Block::present()->meet(); }

template <class F>
int exchange(int value, F f) {
  return device_threads::Block::present()->exchange(value, f);
}
inline int __shfl_up_sync(unsigned, int value, int step) {
  const int lane = threadIdx.x % 32;
  return exchange(value, [=](const int* lanes) { return lanes[lane >= step ? lane - step : lane]; });
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  return exchange(vote, [](const int* lanes) {
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i) votes |= unsigned(lanes[i] != 0) << i;
    return int(votes);
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
inline int __reduce_or_sync(unsigned, int value) {
  return exchange(value, [](const int* lanes) { return std::accumulate(lanes, lanes + 32, 0, std::bit_or<>()); });
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(unsigned x) { return x ? std::countr_zero(x) + 1 : 0; }
inline int __clz(unsigned x) { return std::countl_zero(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline int atomicAdd(int* x, int more) { return std::atomic_ref(*x).fetch_add(more); }
inline int atomicOr(int* x, int bits) { return std::atomic_ref(*x).fetch_or(bits); }

}  // namespace hypermla::cute
