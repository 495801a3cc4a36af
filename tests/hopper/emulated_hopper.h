// Stands in for the wrappers over PTX (kernels/cute/hopper), so that a kernel with TMA and WGMMA runs as C++ threads, a
// thread for each CUDA thread. What it shows: addresses, descriptors, swizzles, and who waits for whom. What it does
// not: the order of asynchronous work, since every copy and every product is done when its call returns.
#pragma once

#include <barrier>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "hypermla/base/half.h"
#include "hypermla/device/tensor_map.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__
#define __align__(bytes)

struct float2 {
  float x, y;
};
struct int2 {
  int x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulated {

struct Index {
  int x = 0;
};
inline thread_local Index thread;
inline Index block, grid;

// A barrier in shared memory: arrivals that are left of a phase, and bytes.
struct PhaseBarrier {
  int arrivals, left;
  std::int64_t bytes = 0;
  unsigned phase = 0;
};
inline std::mutex mutex;
inline std::condition_variable changed;
inline std::map<unsigned, PhaseBarrier> phase_barriers;                // by their address
inline std::map<int, std::unique_ptr<std::barrier<>>> named_barriers;  // by their number
inline std::vector<std::unique_ptr<std::barrier<>>> warps;
inline std::vector<unsigned> of_lanes;  // what the threads exchange

inline void change(unsigned address, int arrivals, std::int64_t bytes) {
  const std::lock_guard lock(mutex);
  PhaseBarrier& barrier = phase_barriers.at(address);
  barrier.left -= arrivals;
  barrier.bytes += bytes;
  if (barrier.left > 0 || barrier.bytes != 0) return;
  barrier.left = barrier.arrivals;
  ++barrier.phase;
  changed.notify_all();
}
inline void meet(int number, int threads) {
  std::unique_lock lock(mutex);
  std::unique_ptr<std::barrier<>>& barrier = named_barriers[number];
  if (!barrier) barrier = std::make_unique<std::barrier<>>(threads);
  lock.unlock();
  barrier->arrive_and_wait();
}
inline void meet_warp() { warps[thread.x / 32]->arrive_and_wait(); }

// Blocks one after the other.
inline void run(int blocks, int threads, const std::function<void()>& kernel);

// What a map of the copy engine says of a tensor.
struct Map {
  const void* data;
  hypermla::TensorMapShape shape;
};
inline hypermla::TensorMap map_of(const void* data, const hypermla::TensorMapShape& shape) {
  const Map map = {data, shape};
  hypermla::TensorMap result = {};
  static_assert(sizeof map <= sizeof result);
  std::memcpy(&result, &map, sizeof map);
  return result;
}

inline unsigned swizzled_address(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

}  // namespace emulated

#define threadIdx ::emulated::thread
#define blockIdx ::emulated::block
#define gridDim ::emulated::grid

namespace hypermla::cute {

using std::max;
using std::min;

alignas(1024) inline unsigned char dynamic[232448];  // all shared memory of a block
inline unsigned __cvta_generic_to_shared(const void* pointer) {
  return unsigned(static_cast<const unsigned char*>(pointer) - dynamic);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  std::memcpy(&emulated::of_lanes[threadIdx.x], &value, sizeof value);
  emulated::meet_warp();
  std::memcpy(&value, &emulated::of_lanes[threadIdx.x / 32 * 32 + lane], sizeof value);
  emulated::meet_warp();
  return value;
}
inline void __syncthreads() { emulated::meet(0, int(emulated::of_lanes.size())); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  std::memcpy(&emulated::of_lanes[threadIdx.x], &value, sizeof value);
  emulated::meet_warp();
  std::memcpy(&value, &emulated::of_lanes[threadIdx.x ^ mask], sizeof value);
  emulated::meet_warp();
  return value;
}

}  // namespace hypermla::cute

#include "hopper/shared.h"

namespace hypermla::cute {

// mbarrier.h
struct Barrier {
  u64 state;
  operator u32() const { return shared_address(this); }
};
template <int n>
using Barriers = Array<Barrier, n>;

inline void barrier_init(u32 barrier, u32 arrivals) {
  emulated::phase_barriers[barrier] = {int(arrivals), int(arrivals)};
}
inline void barrier_init_done() {}
inline void barrier_arrive(u32 barrier) { emulated::change(barrier, 1, 0); }
inline void barrier_expect(u32 barrier, u32 bytes) { emulated::change(barrier, 1, bytes); }
inline void barrier_wait(u32 barrier, u32 parity) {
  std::unique_lock lock(emulated::mutex);
  emulated::changed.wait(lock, [&] { return (emulated::phase_barriers.at(barrier).phase & 1) != parity; });
}

// warpgroup.h
inline u32 lane_id() { return threadIdx.x % 32; }
inline u32 thread_id() { return threadIdx.x; }
inline int uniform(int value) { return value; }
inline void warp_arrive(u32 barrier) {  // its products are those of the whole warp
  emulated::meet_warp();
  if (lane_id() == 0) barrier_arrive(barrier);
}
inline void named_sync(int barrier, int threads) { emulated::meet(barrier, threads); }
template <int>
void take_registers() {}
template <int>
void give_registers() {}
inline bool named_any(int, int, bool yes) { return yes; }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }

// fragments.h, gather.h, copies.h
template <DType dtype>
u32 pack(float low, float high) {
  return from_float(low, dtype) | u32{from_float(high, dtype)} << 16;
}
inline u32 swizzled(u32 line, u32 unit) { return line * 128 + ((unit ^ line % 8) << 4); }
inline void store_zeros(u32 shared) { std::memset(dynamic + shared, 0, 16); }
inline void store_matrices(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  emulated::of_lanes[threadIdx.x] = shared;  // of row lane % 8 of fragment lane / 8
  emulated::meet_warp();
  const u32 fragments[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i)
    std::memcpy(dynamic + emulated::of_lanes[warp + 8 * i + lane / 4] + lane % 4 * 4, &fragments[i], 4);
  emulated::meet_warp();
}
inline void store_transposed(u32, u32, u32, u32, u32) {}
inline void copy_ahead(u32 shared, const void* global) { std::memcpy(dynamic + shared, global, 16); }
inline void wait_for_copies() {}

// tma.h
inline void tma_load(u32 shared, const TensorMap& map, int row, int group, int batch, u32 barrier) {
  emulated::Map of;
  std::memcpy(static_cast<void*>(&of), &map, sizeof of);
  const TensorMapShape& shape = of.shape;
  for (int g = 0; g < shape.box_groups; ++g)
    for (int r = 0; r < shape.box_rows; ++r)
      for (int unit = 0; unit < 8; ++unit) {
        unsigned char* to = dynamic + emulated::swizzled_address(shared + (g * shape.box_rows + r) * 128 + unit * 16);
        const bool exists = row + r < shape.rows && group + g < shape.groups && batch < shape.batch;
        if (exists)
          std::memcpy(to,
                      static_cast<const char*>(of.data) + (row + r) * shape.row_bytes + (group + g) * 128 +
                          batch * shape.batch_bytes + unit * 16,
                      16);
        else
          std::memset(to, 0, 16);
      }
  emulated::change(barrier, 0, -std::int64_t{shape.box_groups} * shape.box_rows * 128);
}
inline void tma_store(const TensorMap& map, u32 shared, int row, int group, int batch) {
  emulated::Map of;
  std::memcpy(static_cast<void*>(&of), &map, sizeof of);
  const TensorMapShape& shape = of.shape;
  for (int g = 0; g < shape.box_groups; ++g)
    for (int r = 0; r < shape.box_rows; ++r)
      for (int unit = 0; unit < 8; ++unit)
        if (row + r < shape.rows && group + g < shape.groups && batch < shape.batch)
          std::memcpy(static_cast<char*>(const_cast<void*>(of.data)) + (row + r) * shape.row_bytes + (group + g) * 128 +
                          batch * shape.batch_bytes + unit * 16,
                      dynamic + emulated::swizzled_address(shared + (g * shape.box_rows + r) * 128 + unit * 16), 16);
}
inline void tma_store_read_wait() {}
inline void tma_store_wait() {}
inline void async_fence() {}

// wgmma.h
inline constexpr u32 kBoxBytes = 64 * 64 * 2, kNextBox = kBoxBytes >> 4;
enum class Major { k, mn };
inline u32 operand_k_major(u32 shared) { return (shared & 0x3ffff) >> 4 | 1u << 16; }
inline u32 operand_mn_major(u32 shared, u32 box_bytes = kBoxBytes) {
  return (shared & 0x3ffff) >> 4 | box_bytes >> 4 << 16;
}
inline void mma_fence() {}
inline void mma_commit() {}
template <int pending>
void mma_wait() {}
template <int n>
void pin(float*) {}

// An element of an operand with the 128-byte swizzle, by its descriptor (PTX, "Asynchronous warpgroup-level matrix
// shared memory layout"): 8 lines of 128 bytes are 1024 bytes apart from the next 8.
template <DType dtype>
float operand_element(u32 operand, Major major, int row, int k) {
  const u32 start = (operand & 0x3fff) << 4, next_columns = (operand >> 16 & 0x3fff) << 4;
  const u32 at = major == Major::k ? start + row / 8 * 1024 + row % 8 * 128 + 2 * k
                                   : start + row / 64 * next_columns + row % 64 * 2 + k / 8 * 1024 + k % 8 * 128;
  std::uint16_t bits;
  std::memcpy(&bits, dynamic + emulated::swizzled_address(at), 2);
  return to_float(bits, dtype);
}
template <DType dtype, int n, Major major_b = Major::k, Major major_a = Major::k>
void mma(float* d, u32 a, u32 b, int accumulate) {
  const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  float rows[2][16];
  for (int half = 0; half < 2; ++half)
    for (int k = 0; k < 16; ++k) rows[half][k] = operand_element<dtype>(a, major_a, row + 8 * half, k);
  for (int i = 0; i < n / 4; ++i) {  // columns of the thread, in pairs
    float sums[2] = {};
    for (int k = 0; k < 16; ++k) {
      const float y = operand_element<dtype>(b, major_b, i / 2 * 8 + thread % 4 * 2 + i % 2, k);
      for (int half = 0; half < 2; ++half) sums[half] += rows[half][k] * y;
    }
    for (int half = 0; half < 2; ++half) {
      float& to = d[i / 2 * 4 + 2 * half + i % 2];
      to = accumulate ? to + sums[half] : sums[half];
    }
  }
}

}  // namespace hypermla::cute

inline void emulated::run(int blocks, int threads, const std::function<void()>& kernel) {
  grid.x = blocks;
  for (block.x = 0; block.x < blocks; ++block.x) {
    std::memset(hypermla::cute::dynamic, 0xff, sizeof hypermla::cute::dynamic);
    phase_barriers.clear();
    named_barriers.clear();
    warps.clear();
    of_lanes.assign(threads, 0);
    for (int i = 0; i < threads; i += 32) warps.push_back(std::make_unique<std::barrier<>>(32));
    std::vector<std::thread> all;
    for (int i = 0; i < threads; ++i)
      all.emplace_back([&, i] {
        thread.x = i;
        kernel();
      });
    for (std::thread& one : all) one.join();
  }
}
