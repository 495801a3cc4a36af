// Stands in for the wrappers over PTX (kernels/cute/hopper), so that a kernel with TMA and WGMMA runs as C++ threads, a
// thread for each CUDA thread. What it shows: addresses, descriptors, swizzles, and who waits for whom. What it does
// not: the order of asynchronous work, since every copy and every product is done when its call returns.
#pragma once

#include <algorithm>
#include <barrier>
#include <bit>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
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
struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
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
  int arrivals = 0, left = 0;
  std::int64_t bytes = 0;
  unsigned phase = 0;
  std::condition_variable over;
};
inline std::mutex mutex;
inline std::map<unsigned, PhaseBarrier> phase_barriers;  // by their address
// How often the threads of a warp have waited at a barrier: the lanes of a warp find it as the first of them does, even
// if the system lets them look when the next phase is over, too.
inline std::map<std::pair<int, unsigned>, int> waits_of_warp;
inline thread_local std::map<unsigned, int> waits_of_thread;

// By their number, with the threads that meet there. Those of a barrier are always as many: a kernel whose threads may
// be at a later meeting while others are still on their way to an earlier one needs that.
inline std::map<int, std::pair<int, std::barrier<>>> named_barriers;
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
  barrier.over.notify_all();
}
inline std::barrier<>& named(int number, int threads) {
  const std::lock_guard lock(mutex);
  const auto at = named_barriers.try_emplace(number, threads, threads).first;
  if (at->second.first != threads) {  // they would wait for ever
    std::fprintf(stderr, "barrier %d of %d threads was of %d\n", number, threads, at->second.first);
    std::abort();
  }
  return at->second.second;
}
inline void meet(int number, int threads) { named(number, threads).arrive_and_wait(); }
inline void meet_warp() { warps[thread.x / 32]->arrive_and_wait(); }

// Blocks one after the other.
inline void run(int blocks, int threads, const std::function<void()>& kernel);

// What a map of the copy engine says of a tensor.
struct Map {
  const void* data;
  hypermla::TensorMapAxis axes[3];
  int line_bytes;
};
inline hypermla::TensorMap map_of(const void* data, const hypermla::TensorMapAxis (&axes)[3], int line_bytes = 128) {
  const Map map = {data, {axes[0], axes[1], axes[2]}, line_bytes};
  hypermla::TensorMap result = {};
  static_assert(sizeof map <= sizeof result);
  std::memcpy(&result, &map, sizeof map);
  return result;
}
inline hypermla::TensorMap map_of(const void* data, const hypermla::TensorMapShape& shape) {
  return map_of(data, {{shape.rows, shape.row_bytes, shape.box_rows},
                       {shape.groups, 128, shape.box_groups},
                       {shape.batch, shape.batch_bytes, 1}});
}
inline Map map_from(const hypermla::TensorMap& map) {
  Map of;
  std::memcpy(static_cast<void*>(&of), &map, sizeof of);
  return of;
}
// Calls on(line in the tensor, or null; its number in the box) for every line of the box there; returns its bytes.
inline int for_each_line(const hypermla::TensorMap& map, int row, int group, int batch,
                         const std::function<void(char*, int)>& on) {
  const Map of = map_from(map);
  const hypermla::TensorMapAxis* axes = of.axes;
  int line = 0;
  for (int k = 0; k < axes[2].box; ++k)
    for (int j = 0; j < axes[1].box; ++j)
      for (int i = 0; i < axes[0].box; ++i, ++line) {
        const bool exists = row + i < axes[0].extent && group + j < axes[1].extent && batch + k < axes[2].extent;
        char* const data = static_cast<char*>(const_cast<void*>(of.data));
        on(exists ? data + (row + i) * axes[0].stride_bytes + (group + j) * axes[1].stride_bytes +
                        (batch + k) * axes[2].stride_bytes
                  : nullptr,
           line);
      }
  return line * of.line_bytes;
}

// Of lines of 128 bytes, 8 units of 16 bytes are in turn over 8 lines; of 64 bytes, 4 units over 4 times 128 bytes.
inline unsigned swizzled_address(unsigned address, int line_bytes = 128) {
  return address ^ (address >> 7 & (line_bytes / 16 - 1)) << 4;
}

}  // namespace emulated

#define threadIdx ::emulated::thread
#define blockIdx ::emulated::block
#define gridDim ::emulated::grid

namespace hypermla::cute {

using std::max;
using std::min;
using u32 = unsigned;
using u64 = unsigned long long;

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
// What f makes of the values of the warp's lanes.
template <class F>
u32 of_warp(u32 value, F f) {
  emulated::of_lanes[threadIdx.x] = value;
  emulated::meet_warp();
  u32 result = value;
  for (int i = 0; i < 32; ++i) result = f(result, i, emulated::of_lanes[threadIdx.x / 32 * 32 + i]);
  emulated::meet_warp();
  return result;
}
inline bool __any_sync(unsigned, bool yes) {
  return of_warp(yes, [](u32 all, int, u32 one) { return all | one; });
}
inline bool __all_sync(unsigned, bool yes) {
  return of_warp(yes, [](u32 all, int, u32 one) { return all & one; });
}
inline u32 __ballot_sync(unsigned, bool yes) {
  return of_warp(yes, [](u32 all, int i, u32 one) { return (i ? all : 0) | one << i; });
}
inline void __syncwarp() { emulated::meet_warp(); }
inline u32 __umulhi(u32 x, u32 y) { return u32(u64{x} * y >> 32); }
inline int __popc(u32 x) { return std::popcount(x); }
inline int __ffs(u32 x) { return x ? std::countr_zero(x) + 1 : 0; }
inline float __fdividef(float x, float y) { return x / y; }
inline u32 __float_as_uint(float x) { return std::bit_cast<u32>(x); }
inline float __uint_as_float(u32 x) { return std::bit_cast<float>(x); }
inline long long clock64() {  // a few looks later is long ago: blocks run one after the other
  static thread_local long long now;
  return now += 1 << 18;
}
template <class T>
T __ldg(const T* x) {
  return *x;
}
inline u64 atomicAdd(u64* x, u64 more) {
  const std::lock_guard lock(emulated::mutex);
  return std::exchange(*x, *x + more);
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
  emulated::PhaseBarrier& made = emulated::phase_barriers[barrier];
  made.arrivals = made.left = int(arrivals);
}
inline void barrier_init_done() {}
inline void barrier_arrive(u32 barrier) { emulated::change(barrier, 1, 0); }
inline void barrier_expect(u32 barrier, u32 bytes) { emulated::change(barrier, 1, bytes); }
inline void barrier_wait(u32 barrier, u32 parity) {
  std::unique_lock lock(emulated::mutex);
  emulated::PhaseBarrier& at = emulated::phase_barriers.at(barrier);
  int& of_warp = emulated::waits_of_warp[{threadIdx.x / 32, barrier}];
  const int own = ++emulated::waits_of_thread[barrier];
  at.over.wait(lock, [&] { return of_warp >= own || (at.phase & 1) != parity; });
  of_warp = std::max(of_warp, own);
}

inline bool barrier_test(u32 barrier, u32 parity) {
  const std::lock_guard lock(emulated::mutex);
  return (emulated::phase_barriers.at(barrier).phase & 1) != parity;
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
inline void named_arrive(int barrier, int threads) { (void)emulated::named(barrier, threads).arrive(); }
inline bool named_any(int barrier, int threads, bool yes) {
  static std::map<int, bool> any;
  const auto with_any = [&](auto change) {
    const std::lock_guard lock(emulated::mutex);
    return change(any[barrier]);
  };
  with_any([&](bool& of) { return of |= yes; });
  named_sync(barrier, threads);
  const bool result = with_any([](bool& of) { return of; });
  named_sync(barrier, threads);
  with_any([](bool& of) { return of = false; });
  named_sync(barrier, threads);
  return result;
}
inline void launch_next() {}
inline void wait_for_previous() {}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }

// fragments.h, gather.h, copies.h
template <DType dtype>
u32 pack(float low, float high) {
  return from_float(low, dtype) | u32{from_float(high, dtype)} << 16;
}
template <DType dtype>
float2 unpack(u32 packed) {
  return {to_float(std::uint16_t(packed), dtype), to_float(std::uint16_t(packed >> 16), dtype)};
}
inline u32 swizzled(u32 line, u32 unit) { return line * 128 + ((unit ^ line % 8) << 4); }
inline void store_zeros(u32 shared) { std::memset(dynamic + shared, 0, 16); }
inline uint4 load_shared(u32 shared) {
  uint4 x;
  std::memcpy(&x, dynamic + shared, sizeof x);
  return x;
}
// The fragment of the transpose.
inline u32 transpose_fragment(u32 a) {
  const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;  // holds columns 2 (lane % 4) and one on of lane / 4
  emulated::of_lanes[threadIdx.x] = a;
  emulated::meet_warp();
  const auto element = [&](int row, int column) {
    return emulated::of_lanes[warp + row * 4 + column / 2] >> column % 2 * 16 & 0xffff;
  };
  const u32 b = element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
  emulated::meet_warp();
  return b;
}
inline void store_matrices(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  emulated::of_lanes[threadIdx.x] = shared;  // of row lane % 8 of fragment lane / 8
  emulated::meet_warp();
  const u32 fragments[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i)
    std::memcpy(dynamic + emulated::of_lanes[warp + 8 * i + lane / 4] + lane % 4 * 4, &fragments[i], 4);
  emulated::meet_warp();
}
inline void store_transposed(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  store_matrices(shared, transpose_fragment(a), transpose_fragment(b), transpose_fragment(c), transpose_fragment(d));
}
inline void copy_ahead(u32 shared, const void* global) { std::memcpy(dynamic + shared, global, 16); }
inline void wait_for_copies() {}
inline void barrier_arrive_when_copied(u32 barrier) { barrier_arrive(barrier); }

// global.h
inline uint4 load_at_once(const uint4* from, bool wanted) { return wanted ? *from : uint4{}; }
inline float load_at_once(const float* from, bool wanted, float otherwise) { return wanted ? *from : otherwise; }
inline void fence_all() {}
inline u64 load_acquire(const u64* from) {
  const std::lock_guard lock(emulated::mutex);
  return *from;
}

// fp8.h
inline uint4 load_in_place(const unsigned char* from, bool wanted) {
  uint4 x = {};
  if (wanted) std::memcpy(&x, from, sizeof x);
  return x;
}
inline void store_line(u32 shared, uint4 x) { std::memcpy(dynamic + shared, &x, sizeof x); }
inline void copy_ahead_or_zero(u32 shared, const void* global, bool wanted) {
  wanted ? copy_ahead(shared, global) : store_zeros(shared);
}
using HalfFactor = float;
inline uint4 widen_e4m3(u32 first, u32 second, HalfFactor scale) {
  u32 words[4];
  for (int i = 0; i < 4; ++i) {
    const u32 bytes = (i < 2 ? first : second) >> i % 2 * 16;
    const auto element = [&](u32 byte) { return e4m3_to_float(static_cast<unsigned char>(byte)) * scale; };
    words[i] = pack<DType::float16>(element(bytes), element(bytes >> 8));
  }
  return {words[0], words[1], words[2], words[3]};
}
inline uint4 halves_of_bf16(uint4 x) {
  const auto two = [](u32 both) {
    const float2 of = unpack<DType::bfloat16>(both);
    return pack<DType::float16>(of.x, of.y);
  };
  return {two(x.x), two(x.y), two(x.z), two(x.w)};
}

// tma.h
enum class Keep { normal, evict_first };
inline void tma_prefetch_map(const TensorMap&) {}
inline void tma_prefetch(const TensorMap&, int, int, int) {}
template <Keep = Keep::normal>
void tma_load(u32 shared, const TensorMap& map, int row, int group, int batch, u32 barrier) {
  const int line_bytes = emulated::map_from(map).line_bytes;
  const int bytes = emulated::for_each_line(map, row, group, batch, [&](const char* from, int line) {
    for (int unit = 0; unit < line_bytes / 16; ++unit) {
      unsigned char* to = dynamic + emulated::swizzled_address(shared + line * line_bytes + unit * 16, line_bytes);
      from ? std::memcpy(to, from + unit * 16, 16) : std::memset(to, 0, 16);
    }
  });
  emulated::change(barrier, 0, -std::int64_t{bytes});
}
inline void tma_store(const TensorMap& map, u32 shared, int row, int group, int batch) {
  emulated::for_each_line(map, row, group, batch, [&](char* to, int line) {
    for (int unit = 0; to && unit < 8; ++unit)
      std::memcpy(to + unit * 16, dynamic + emulated::swizzled_address(shared + line * 128 + unit * 16), 16);
  });
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
// d += rows b, where rows[0] and rows[1] are the thread's rows of a.
template <DType dtype, int n>
void multiply(float* d, const float (&rows)[2][16], u32 b, Major major_b, int accumulate) {
  for (int i = 0; i < n / 4; ++i) {  // columns of the thread, in pairs
    float sums[2] = {};
    for (int k = 0; k < 16; ++k) {
      const float y = operand_element<dtype>(b, major_b, i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2, k);
      for (int half = 0; half < 2; ++half) sums[half] += rows[half][k] * y;
    }
    for (int half = 0; half < 2; ++half) {
      float& to = d[i / 2 * 4 + 2 * half + i % 2];
      to = accumulate ? to + sums[half] : sums[half];
    }
  }
}
template <DType dtype, int n, Major major_b = Major::k, Major major_a = Major::k>
void mma(float* d, u32 a, u32 b, int accumulate) {
  const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  float rows[2][16];
  for (int half = 0; half < 2; ++half)
    for (int k = 0; k < 16; ++k) rows[half][k] = operand_element<dtype>(a, major_a, row + 8 * half, k);
  multiply<dtype, n>(d, rows, b, major_b, accumulate);
}
template <DType dtype, int n, Major major_b = Major::k>
void mma(float* d, const u32* a, u32 b, int accumulate) {
  float rows[2][16];
  const int group = threadIdx.x % 32 / 4 * 4;  // the first of the lanes that hold the rows
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 4; ++k) {
      const float2 x = unpack<dtype>(__shfl_sync(~0u, a[i], group + k));
      rows[i % 2][i / 2 * 8 + 2 * k] = x.x;
      rows[i % 2][i / 2 * 8 + 2 * k + 1] = x.y;
    }
  multiply<dtype, n>(d, rows, b, major_b, accumulate);
}

// e4m3.h
enum class Line { bytes_128, bytes_64 };
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 both = a | u64{b} << 32;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) result |= u32(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline u32 pack_e4m3(float a, float b, float c, float d) {
  return e4m3_from_float(a) | e4m3_from_float(b) << 8 | e4m3_from_float(c) << 16 | u32{e4m3_from_float(d)} << 24;
}
inline float sum_of_e4m3(const u32 (&words)[2]) {
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += e4m3_to_float(static_cast<unsigned char>(words[i / 4] >> i % 4 * 8));
  return sum;
}
// Lane l of ldmatrix holds elements 2 (l % 4) and the one after it of row l / 4 of a fragment; of its transpose, rows
// 2 (l % 4) and the one after it of column l / 4.
inline void load_transposed(u32 (&a)[4], u32 shared) {
  const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  emulated::of_lanes[threadIdx.x] = shared;
  emulated::meet_warp();
  for (int i = 0; i < 4; ++i) {
    std::uint16_t elements[2];
    for (int e = 0; e < 2; ++e)
      std::memcpy(&elements[e], dynamic + emulated::of_lanes[warp + 8 * i + lane % 4 * 2 + e] + lane / 4 * 2, 2);
    a[i] = elements[0] | u32{elements[1]} << 16;
  }
  emulated::meet_warp();
}
// An element of an operand whose lines the product runs along, by its descriptor: 8 lines follow each other, and so do
// eights of lines.
inline float operand_element_e4m3(u32 operand, int line_bytes, int row, int k) {
  const u32 at = ((operand & 0x3fff) << 4) + row / 8 * (8 * line_bytes) + row % 8 * line_bytes + k;
  return e4m3_to_float(dynamic[emulated::swizzled_address(at, line_bytes)]);
}
inline void multiply_e4m3(float* d, const float (&rows)[2][32], u32 b, int line_bytes, int accumulate) {
  for (int i = 0; i < 16; ++i) {  // columns of the thread, in pairs
    float sums[2] = {};
    for (int k = 0; k < 32; ++k) {
      const float y = operand_element_e4m3(b, line_bytes, i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2, k);
      for (int half = 0; half < 2; ++half) sums[half] += rows[half][k] * y;
    }
    for (int half = 0; half < 2; ++half) {
      float& to = d[i / 2 * 4 + 2 * half + i % 2];
      to = accumulate ? to + sums[half] : sums[half];
    }
  }
}
template <Line line>
void mma_e4m3(float* d, u32 a, u32 b, int accumulate) {
  constexpr int kBytes = line == Line::bytes_128 ? 128 : 64;
  const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  float rows[2][32];
  for (int half = 0; half < 2; ++half)
    for (int k = 0; k < 32; ++k) rows[half][k] = operand_element_e4m3(a, kBytes, row + 8 * half, k);
  multiply_e4m3(d, rows, b, kBytes, accumulate);
}
// a (PTX, "Register fragments for wgmma.mma_async.m64nNk32"): four bytes of a register follow each other along k;
// registers 0 and 1 are rows t / 4 and t / 4 + 8 of k = 4 (t % 4) .., 2 and 3 those of k = 16 + 4 (t % 4) ..
inline void mma_e4m3(float* d, const u32* a, u32 b) {
  float rows[2][32];
  const int group = threadIdx.x % 32 / 4 * 4;
  for (int i = 0; i < 4; ++i)
    for (int lane = 0; lane < 4; ++lane) {
      const u32 word = __shfl_sync(~0u, a[i], group + lane);
      for (int e = 0; e < 4; ++e)
        rows[i % 2][i / 2 * 16 + 4 * lane + e] = e4m3_to_float(static_cast<unsigned char>(word >> 8 * e));
    }
  multiply_e4m3(d, rows, b, 64, 1);
}

}  // namespace hypermla::cute

inline void emulated::run(int blocks, int threads, const std::function<void()>& kernel) {
  grid.x = blocks;
  for (block.x = 0; block.x < blocks; ++block.x) {
    std::memset(hypermla::cute::dynamic, 0xff, sizeof hypermla::cute::dynamic);
    phase_barriers.clear();
    waits_of_warp.clear();
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
