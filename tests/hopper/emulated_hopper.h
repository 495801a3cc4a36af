// Stands in for the wrappers over PTX (kernels/cute/hopper), so that a kernel with TMA and WGMMA runs as plain C++, a
// context for each CUDA thread (cuda_threads.h). What it shows: addresses, descriptors, swizzles, who waits for whom,
// and products that are touched before they are waited for: they are made then. races.h shows what nothing orders.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cuda_threads.h"
#include "hypermla/base/half.h"
#include "hypermla/device/tensor_map.h"
#include "races.h"

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
struct int4 {
  int x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulated {

// The boxes that L2 was asked for.
struct Asked {
  const hypermla::TensorMap* map;
  int row, group, batch;
};
inline std::vector<Asked> asked;

inline unsigned passed_clocks = 0;  // that the last thread which waited let pass
inline unsigned launched_next = 0;  // threads that let the next kernel start

// Where threads meet: `threads` of them, some of which may go on at once.
struct Meeting {
  int threads, arrived = 0;
  unsigned turn = 0;
  const char* of = nullptr;
  bool any = false, was_any = false;  // what those said who came, and in the last turn
  std::vector<int> waiting;
  races::Sync sync = {};

  explicit Meeting(int threads = 32) : threads(threads) {}
  // The last that comes does `last`.
  template <class Last>
  void meet(const char* place, unsigned which, bool orders, bool waits, const Last& last) {
    if (arrived++ == 0) of = place;
    if (std::strcmp(of, place)) Threads::all().stop("lanes of a warp meet at " + std::string(of) + " and " + place);
    if (orders) races::arrive(sync, place, which);
    if (arrived < threads) {
      if (!waits) return;
      waiting.push_back(thread.x);
      return Threads::all().wait(place, which);
    }
    last();
    arrived = 0;
    ++turn;
    if (waits) waiting.push_back(thread.x);
    if (orders) {
      races::complete(sync);
      for (const int one : waiting) races::acquire(sync, one);
    }
    for (const int one : waiting)
      if (one != thread.x) Threads::all().wake(one);
    waiting.clear();
  }
};

// A barrier in shared memory: arrivals that are left of a phase, and bytes.
struct PhaseBarrier {
  int arrivals = 0, left = 0;
  std::int64_t bytes = 0;
  unsigned phase = 0;
  std::vector<int> waiting;
  // Where a lane of a warp has found the phase of a parity over, those beside it do, too, even if they look when the
  // next one is over: lanes that nothing holds apart wait together. Which have, since the warp has met last.
  struct Found {
    unsigned turn, lanes;
  };
  std::map<std::pair<int, unsigned>, Found> found;
  races::Sync sync = {};
};
inline std::map<unsigned, PhaseBarrier> phase_barriers;  // by their address
inline std::map<int, Meeting> named_barriers;
inline std::vector<Meeting> warps;
inline std::vector<unsigned long long> of_lanes[2];  // what threads exchange, of this turn and the last

inline void change(unsigned address, int arrivals, std::int64_t bytes) {
  PhaseBarrier& barrier = phase_barriers.at(address);
  barrier.left -= arrivals;
  barrier.bytes += bytes;
  if (barrier.left < 0) Threads::all().stop("more arrivals than the barrier at " + std::to_string(address) + " counts");
  if (barrier.left > 0 || barrier.bytes != 0) return;
  barrier.left = barrier.arrivals;
  ++barrier.phase;
  races::complete(barrier.sync, address);
  for (const int one : barrier.waiting) Threads::all().wake(one);
  barrier.waiting.clear();
}
// What is written over a barrier that was not invalidated may be lost on a GPU.
inline void no_barrier_in(unsigned address, unsigned bytes) {
  const auto next = phase_barriers.lower_bound(address < 7 ? 0 : address - 7);
  if (next != phase_barriers.end() && next->first < address + bytes)
    Threads::all().stop("a write over the barrier at " + std::to_string(next->first));
}
// Those of a number are always as many: a kernel whose threads may be at a later meeting while others are still on
// their way to an earlier one needs that.
inline Meeting& named(int number, int threads) {
  Meeting& at = named_barriers.try_emplace(number, threads).first->second;
  if (at.threads != threads) {  // they would wait for ever
    Threads::all().stop("barrier " + std::to_string(number) + " of " + std::to_string(threads) + " threads was of " +
                        std::to_string(at.threads));
  }
  return at;
}
inline void meet(int number, int threads, bool waits = true) {
  named(number, threads).meet("named barrier", unsigned(number), true, waits, [] {});
}
// The lanes of a warp; where nothing is said of memory, their accesses stay without order.
template <class Last>
void meet_warp(const char* place, bool orders, const Last& last) {
  warps[thread.x / 32].meet(place, unsigned(thread.x / 32), orders, true, last);
}
inline void converge(const char* place) {
  meet_warp(place, false, [] {});
}
// The values of the warp's lanes.
template <class T>
struct Lanes {
  const unsigned long long* first;
  T operator[](int lane) const {
    T value;
    std::memcpy(&value, first + lane, sizeof value);
    return value;
  }
  template <class F>
  T all(T value, const F& f) const {
    for (int lane = 0; lane < 32; ++lane) value = f(value, (*this)[lane]);
    return value;
  }
};
template <class T>
Lanes<T> exchange(const char* place, T value) {
  std::vector<unsigned long long>& of = of_lanes[warps[thread.x / 32].turn & 1];
  std::memcpy(&of[thread.x], &value, sizeof value);
  converge(place);
  return {&of[thread.x / 32 * 32]};
}

// Blocks one after the other.
inline void run(int blocks, int threads, const std::function<void()>& kernel);

// What a map of the copy engine says of a tensor.
struct Map {
  const void* data;
  std::array<hypermla::TensorMapAxis, 4> axes;
  int line_bytes;
};
inline hypermla::TensorMap map_of(const hypermla::TensorMapSource& source) {
  Map map = {source.data, source.axes, 2 * source.columns};
  if (map.axes[3].extent == 0) map.axes[3] = {1, 0, 1};
  hypermla::TensorMap result = {};
  static_assert(sizeof map <= sizeof result);
  std::memcpy(&result, &map, sizeof map);
  return result;
}
inline hypermla::TensorMap map_of(const void* data, const hypermla::TensorMapShape& shape) {
  return map_of({.data = data,
                 .axes = {{{shape.rows, shape.row_bytes, shape.box_rows},
                           {shape.groups, 128, shape.box_groups},
                           {shape.batch, shape.batch_bytes, 1}}}});
}
inline Map map_from(const hypermla::TensorMap& map) {
  Map of;
  std::memcpy(static_cast<void*>(&of), &map, sizeof of);
  return of;
}
// Calls on(line in the tensor, or null; its number in the box) for every line of the box there; returns its bytes.
template <class On>
[[gnu::always_inline]] inline int for_each_line(const hypermla::TensorMap& map, int row, int group, int batch, int last,
                                                const On& on) {
  const Map of = map_from(map);
  const auto& axes = of.axes;
  int line = 0;
  for (int k = 0; k < axes[2].box; ++k)
    for (int j = 0; j < axes[1].box; ++j)
      for (int i = 0; i < axes[0].box; ++i, ++line) {
        const bool exists = row + i < axes[0].extent && group + j < axes[1].extent && batch + k < axes[2].extent &&
                            last < axes[3].extent;
        char* const data = static_cast<char*>(const_cast<void*>(of.data));
        on(exists ? data + last * axes[3].stride_bytes + (row + i) * axes[0].stride_bytes +
                        (group + j) * axes[1].stride_bytes + (batch + k) * axes[2].stride_bytes
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
  return emulated::exchange("shuffle", value)[lane];
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::exchange("shuffle", value)[threadIdx.x % 32 ^ mask];
}
template <class T>
T __shfl_up_sync(unsigned, T value, int by) {
  return emulated::exchange("shuffle",
                            value)[std::max(threadIdx.x % 32 - by, threadIdx.x % 32 < by ? threadIdx.x % 32 : 0)];
}
inline u32 __ballot_sync(unsigned, bool yes) {
  u32 all = 0;
  const auto of_lanes = emulated::exchange("vote", yes);
  for (int i = 0; i < 32; ++i) all |= u32{of_lanes[i]} << i;
  return all;
}
inline bool __any_sync(unsigned, bool yes) { return __ballot_sync(~0u, yes) != 0; }
inline bool __all_sync(unsigned, bool yes) { return __ballot_sync(~0u, yes) == ~0u; }
inline int __reduce_add_sync(unsigned, int value) {
  return emulated::exchange("reduction", value).all(0, std::plus<>());
}
inline int __reduce_max_sync(unsigned, int value) {
  return emulated::exchange("reduction", value).all(value, [](int x, int y) { return std::max(x, y); });
}
inline int __reduce_or_sync(unsigned, int value) {
  return emulated::exchange("reduction", value).all(0, std::bit_or<>());
}
inline void __syncwarp() {
  emulated::meet_warp("__syncwarp", true, [] {});
}
inline u32 __umulhi(u32 x, u32 y) { return u32(u64{x} * y >> 32); }
inline int __popc(u32 x) { return std::popcount(x); }
inline int __clz(u32 x) { return std::countl_zero(x); }
inline int __ffs(u32 x) { return x ? std::countr_zero(x) + 1 : 0; }
inline float __fdividef(float x, float y) { return x / y; }
inline u32 __float_as_uint(float x) { return std::bit_cast<u32>(x); }
inline float __uint_as_float(u32 x) { return std::bit_cast<float>(x); }
inline long long clock64() {  // a few looks later is long ago: blocks run one after the other
  static long long now;
  return now += 1 << 18;
}
template <class T>
T __ldg(const T* x) {
  return *x;
}
template <class T>
T atomicAdd(T* x, T more) {
  races::change_word(x);
  const races::Unwatched emulation;
  return std::exchange(*x, *x + more);
}
template <class T>
T atomicCAS(T* x, T wanted, T value) {
  races::change_word(x);
  const races::Unwatched emulation;
  return *x == wanted ? std::exchange(*x, value) : *x;
}
inline void __syncthreads() { emulated::meet(0, emulated::Threads::all().count()); }

}  // namespace hypermla::cute

#include "hopper/constants.h"
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
inline void barrier_expect(u32 barrier, u32 bytes) {
  races::arrive(emulated::phase_barriers.at(barrier).sync, "the barrier at", barrier);
  emulated::change(barrier, 1, bytes);
}
inline void barrier_arrive(u32 barrier) { barrier_expect(barrier, 0); }
inline bool barrier_test(u32 barrier, u32 parity) {
  emulated::PhaseBarrier& at = emulated::phase_barriers.at(barrier);
  auto& found = at.found[{threadIdx.x / 32, parity}];
  const u32 turn = emulated::warps[threadIdx.x / 32].turn, lane = 1u << threadIdx.x % 32;
  if (found.turn != turn || found.lanes & lane) found = {turn, 0};
  if (found.lanes == 0 && (at.phase & 1) == parity) return false;
  found.lanes |= lane;
  races::acquire_by_parity(at.sync);
  return true;
}
inline void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_test(barrier, parity)) {
    emulated::phase_barriers.at(barrier).waiting.push_back(threadIdx.x);
    emulated::Threads::all().wait("the barrier at", barrier);
  }
}

// warpgroup.h
inline u32 lane_id() { return threadIdx.x % 32; }
inline u32 thread_id() { return threadIdx.x; }
inline u32 block_id() { return blockIdx.x; }
inline int uniform(int value) { return __reduce_max_sync(~0u, value); }
inline void forget_origin(int&) {}
inline void warp_arrive(u32 barrier) {
  emulated::converge("warp_arrive");
  if (lane_id() == 0) barrier_arrive(barrier);
}
inline void named_sync(int barrier, int threads) { emulated::meet(barrier, threads); }
template <int>
void take_registers() {}
template <int>
void give_registers() {}
inline void named_arrive(int barrier, int threads) { emulated::meet(barrier, threads, false); }
inline bool named_any(int barrier, int threads, bool yes) {
  emulated::Meeting& at = emulated::named(barrier, threads);
  at.any |= yes;
  at.meet("named barrier", unsigned(barrier), true, true, [&] { at.was_any = std::exchange(at.any, false); });
  return at.was_any;
}
inline void pass_clocks(u32 clocks) { emulated::passed_clocks = clocks; }
inline void launch_next() { ++emulated::launched_next; }
inline void wait_for_previous() {}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float reciprocal_fast(float x) { return 1.0f / x; }
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
inline u32 swizzled_64(u32 line, u32 unit) { return line * 64 + ((unit ^ (line / 2 % 4)) << 4); }
// What a thread does itself with shared memory.
inline void store_bytes(u32 shared, const void* from, int bytes, races::Care care = races::kAll) {
  races::writes(dynamic + shared, bytes, care);
  const races::Unwatched emulation;
  emulated::no_barrier_in(shared, bytes);
  std::memcpy(dynamic + shared, from, bytes);
}
inline void store_line(u32 shared, uint4 x) { store_bytes(shared, &x, sizeof x); }
inline void store_zeros(u32 shared) {
  const uint4 zeros = {};
  store_bytes(shared, &zeros, sizeof zeros, races::kZeros);
}
inline uint4 load_shared(u32 shared) {
  races::reads(dynamic + shared, 16);
  const races::Unwatched emulation;
  uint4 x;
  std::memcpy(&x, dynamic + shared, sizeof x);
  return x;
}
// The fragment of the transpose.
inline u32 transpose_fragment(u32 a) {
  const auto all = emulated::exchange("movmatrix", a);  // holds columns 2 (lane % 4) and one on of lane / 4
  const int lane = threadIdx.x % 32;
  const auto element = [&](int row, int column) { return all[row * 4 + column / 2] >> column % 2 * 16 & 0xffff; };
  return element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
}
inline void store_matrices(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  const auto rows = emulated::exchange("stmatrix", shared);  // of row lane % 8 of fragment lane / 8
  const int lane = threadIdx.x % 32;
  const u32 fragments[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) store_bytes(rows[8 * i + lane / 4] + lane % 4 * 4, &fragments[i], 4);
}
inline void store_transposed(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  store_matrices(shared, transpose_fragment(a), transpose_fragment(b), transpose_fragment(c), transpose_fragment(d));
}
inline void copy_ahead_or_zero(u32 shared, const void* global, bool wanted) {
  const races::Unwatched emulation;
  emulated::no_barrier_in(shared, 16);
  races::writes_beside(races::agent_of(races::kCopies), dynamic + shared, 16, false);
  wanted ? std::memcpy(dynamic + shared, global, 16) : std::memset(dynamic + shared, 0, 16);
}
template <Keep = Keep::normal>
void copy_ahead(u32 shared, const void* global) {
  copy_ahead_or_zero(shared, global, true);
}
inline void wait_for_copies() {
  const int copies = races::agent_of(races::kCopies);
  races::finish(copies, races::begin(copies) - 1, threadIdx.x);
}
inline void barrier_arrive_when_copied(u32 barrier) {
  const int copies = races::agent_of(races::kCopies);
  races::arrive_beside(emulated::phase_barriers.at(barrier).sync, copies);
  races::begin(copies);
  emulated::change(barrier, 1, 0);
}

// code.h. There is no code of a GPU here.
struct CodeRange {
  u64 begin = 0, end = 0;
};
inline CodeRange code_range() { return {}; }
inline void prefetch_line(u64) {}

// global.h
template <class T>
T load_at_once(const void* from, bool wanted) {
  T x = {};
  if (!wanted) return x;
  races::reads(from, sizeof x);
  const races::Unwatched emulation;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline void store_to_stay(uint4* to, uint4 x) { *to = x; }
inline uint4 load_last(const void* from) { return load_at_once<uint4>(from, true); }
inline void fence_all() { races::fence_all(); }
inline u64 add_release(u64* to, u64 more) {
  races::fence_all();
  return atomicAdd(to, more);
}
inline u64 load_acquire(const u64* from) {
  races::acquire_word(from);
  const races::Unwatched emulation;
  return *from;
}

// fp8.h
inline uint2 halves_of_e4m3(u32 word) {
  const auto element = [&](int i) { return e4m3_to_float(static_cast<unsigned char>(word >> 8 * i)); };
  return {pack<DType::float16>(element(0), element(1)), pack<DType::float16>(element(2), element(3))};
}

// tma.h
inline void tma_prefetch_map(const TensorMap&) {}
inline void tma_prefetch(const TensorMap& map, int row, int group, int batch) {
  emulated::asked.push_back({&map, row, group, batch});
}
template <Keep = Keep::normal>
void tma_load(u32 shared, const TensorMap& map, int row, int group, int batch, int last, u32 barrier) {
  const races::Unwatched emulation;
  const int engine = races::agent_of(races::kCopyEngine, barrier), line_bytes = emulated::map_from(map).line_bytes;
  races::begin(engine);
  const int bytes = emulated::for_each_line(
      map, row, group, batch, last, [&](const char* from, int line) __attribute__((always_inline)) {
        for (int unit = 0; unit < line_bytes / 16; ++unit) {
          unsigned char* to = dynamic + emulated::swizzled_address(shared + line * line_bytes + unit * 16, line_bytes);
          emulated::no_barrier_in(unsigned(to - dynamic), 16);
          races::writes_beside(engine, to, 16);
          from ? std::memcpy(to, from + unit * 16, 16) : std::memset(to, 0, 16);
        }
      });
  races::arrive_beside(emulated::phase_barriers.at(barrier).sync, engine);
  emulated::change(barrier, 0, -std::int64_t{bytes});
}
template <Keep keep = Keep::normal>
void tma_load(u32 shared, const TensorMap& map, int row, int group, int batch, u32 barrier) {
  tma_load<keep>(shared, map, row, group, batch, 0, barrier);
}
template <int bytes, Keep = Keep::normal>
void copy_bulk(u32 shared, const void* global, u32 barrier) {
  const races::Unwatched emulation;
  const int engine = races::agent_of(races::kCopyEngine, barrier);
  races::begin(engine);
  emulated::no_barrier_in(shared, bytes);
  races::writes_beside(engine, dynamic + shared, bytes);
  std::memcpy(dynamic + shared, global, bytes);
  races::arrive_beside(emulated::phase_barriers.at(barrier).sync, engine);
  emulated::change(barrier, 0, -std::int64_t{bytes});
}
inline void tma_store(const TensorMap& map, u32 shared, int row, int group, int batch) {
  const races::Unwatched emulation;
  const int engine = races::agent_of(races::kStores);
  emulated::for_each_line(
      map, row, group, batch, 0, [&](char* to, int line) __attribute__((always_inline)) {
        for (int unit = 0; unit < 8; ++unit) {
          const unsigned char* from = dynamic + emulated::swizzled_address(shared + line * 128 + unit * 16);
          races::reads_beside(engine, from, 16);
          if (to) std::memcpy(to + unit * 16, from, 16);
        }
      });
}
inline void tma_store_read_wait() {
  const int engine = races::agent_of(races::kStores);
  races::finish(engine, races::begin(engine) - 1, threadIdx.x);
}
inline void tma_store_wait() { tma_store_read_wait(); }
inline void async_fence() { races::fence_proxy(); }

// wgmma.h
inline constexpr u32 kBoxBytes = 64 * 64 * 2, kNextBox = kBoxBytes >> 4;
enum class Major { k, mn };
inline u32 operand_k_major(u32 shared) { return (shared & 0x3ffff) >> 4 | 1u << 16; }
inline u32 operand_mn_major(u32 shared, u32 box_bytes = kBoxBytes) {
  return (shared & 0x3ffff) >> 4 | box_bytes >> 4 << 16;
}
inline void mma_fence() { emulated::converge("wgmma.fence"); }
template <int n>
void pin(float*) {}

}  // namespace hypermla::cute

namespace emulated {

// A product of a thread, until it is waited for.
struct Product {
  using Lanes = std::array<const Product*, 32>;
  void (*make)(const Lanes&);
  float* d;
  const unsigned* a_fragments;  // null: a is an operand
  unsigned a, b;
  int accumulate;
};
struct Products {
  std::vector<Product> all;
  std::vector<std::size_t> groups;  // where the groups that are in flight end
  std::vector<unsigned> clocks;     // of the agent, when they were closed
  int agent = -1;
};
inline std::vector<Products> products;  // of the threads
// What reads on behalf of the products of this thread's warp.
inline int agent_of_products() {
  int& agent = products[thread.x / 32 * 32].agent;
  if (agent < 0) agent = races::agent_of(races::kMma);
  return agent;
}

using hypermla::DType;
using hypermla::cute::Major;

// Bytes from the start of shared memory to 16 bytes of an operand with the 128-byte swizzle, by its descriptor (PTX,
// "Asynchronous warpgroup-level matrix shared memory layout"): 8 lines of 128 bytes are 1024 bytes apart from the next
// 8. They are columns k .. k + 7 of a row, or rows row .. row + 7 of a column.
inline unsigned place_of_operand(unsigned operand, Major major, int row, int k) {
  const unsigned start = (operand & 0x3fff) << 4, next_columns = (operand >> 16 & 0x3fff) << 4;
  return swizzled_address(major == Major::k
                              ? start + row / 8 * 1024 + row % 8 * 128 + 2 * k
                              : start + row / 64 * next_columns + row % 64 * 2 + k / 8 * 1024 + k % 8 * 128);
}
// Calls on(bytes from the start of shared memory, row, column) for every 16 bytes of an operand of `rows` rows.
template <class On>
[[gnu::always_inline]] inline void for_each_unit(unsigned operand, Major major, int rows, const On& on) {
  for (int row = 0; row < rows; row += major == Major::k ? 1 : 8)
    for (int k = 0; k < 16; k += major == Major::k ? 8 : 1) on(place_of_operand(operand, major, row, k), row, k);
}
template <DType dtype>
const float* numbers() {  // of all 16 bits
  static const std::vector<float> all = [] {
    std::vector<float> all(1 << 16);
    for (int i = 0; i < 1 << 16; ++i) all[i] = hypermla::to_float(std::uint16_t(i), dtype);
    return all;
  }();
  return all.data();
}
template <DType dtype>
void read_operand(float (*to)[16], unsigned operand, Major major, int rows, int first = 0) {
  const float* const number = numbers<dtype>();
  for_each_unit(operand, major, rows, [&](unsigned place, int row, int k) {
    std::uint16_t bits[8];
    std::memcpy(bits, hypermla::cute::dynamic + place, 16);
    for (int i = 0; i < 8; ++i) {
      const int of_row = row + (major == Major::k ? 0 : i) - first, column = k + (major == Major::k ? i : 0);
      if (of_row >= 0) to[of_row][column] = number[bits[i]];
    }
  });
}

// The products of a warp, of the 16 rows of a that are its own.
template <DType dtype, int n, Major major_b, Major major_a>
void multiply(const Product::Lanes& lanes) {
  const Product& of = *lanes[0];
  float a[64][16], b[n][16], b_columns[16][n];
  const int own = of.a_fragments ? 0 : thread.x % 128 / 32 * 16;
  if (of.a_fragments) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) {
          const unsigned bits = lanes[lane]->a_fragments[i] >> 16 * j & 0xffff;
          a[lane / 4 + i % 2 * 8][i / 2 * 8 + lane % 4 * 2 + j] = numbers<dtype>()[bits];
        }
  } else {
    read_operand<dtype>(a, of.a, major_a, 64);
  }
  read_operand<dtype>(b, of.b, major_b, n);
  for (int k = 0; k < 16; ++k)
    for (int j = 0; j < n; ++j) b_columns[k][j] = b[j][k];
  for (int row = 0; row < 16; ++row) {
    float sums[n] = {};
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < n; ++j) sums[j] += a[own + row][k] * b_columns[k][j];
    for (int j = 0; j < n; ++j) {
      const Product& to = *lanes[row % 8 * 4 + j % 8 / 2];
      float& d = to.d[j / 8 * 4 + row / 8 * 2 + j % 2];
      d = to.accumulate ? d + sums[j] : sums[j];
    }
  }
}

// Begins a product. What it reads is looked at as the first lane's.
template <DType dtype, int n, Major major_b, Major major_a>
[[gnu::always_inline]] inline void begin_product(float* d, const unsigned* a_fragments, unsigned a, unsigned b,
                                                 int accumulate) {
  const races::Unwatched emulation;
  Products& own = products[thread.x];
  own.all.push_back({multiply<dtype, n, major_b, major_a>, d, a_fragments, a, b, accumulate});
#ifdef HYPERMLA_RACES
  if (thread.x % 32) return;
  const int agent = agent_of_products();
  const auto read = [&](unsigned operand, Major major, int rows) __attribute__((always_inline)) {
    for_each_unit(
        operand, major, rows, [&](unsigned place, int, int) __attribute__((always_inline)) {
          races::reads_beside(agent, hypermla::cute::dynamic + place, 16,
                              major == Major::k ? races::kScores : races::kAll);
        });
  };
  if (!a_fragments) read(a, major_a, 64);
  read(b, major_b, n);
#endif
}
// Makes the products of this thread's warp, all but those of the last `pending` groups.
inline void make_products(std::size_t pending) {
  const races::Unwatched emulation;
  const int first = thread.x / 32 * 32;
  Products& of_first = products[first];
  if (of_first.groups.size() <= pending) return;
  const std::size_t done = of_first.groups.size() - pending, count = of_first.groups[done - 1];
  for (std::size_t i = 0; i < count; ++i) {
    Product::Lanes lanes;
    for (int lane = 0; lane < 32; ++lane) {
      Products& of = products[first + lane];
      lanes[lane] = &of.all.at(i);
      if (lanes[lane]->make != lanes[0]->make || lanes[lane]->a != lanes[0]->a || lanes[lane]->b != lanes[0]->b)
        Threads::all().stop("lanes of a warp multiply different operands");
    }
    lanes[0]->make(lanes);
  }
  for (int lane = 0; lane < 32; ++lane) {
    Products& of = products[first + lane];
    of.all.erase(of.all.begin(), of.all.begin() + std::ptrdiff_t(count));
    of.groups.erase(of.groups.begin(), of.groups.begin() + std::ptrdiff_t(done));
    for (std::size_t& end : of.groups) end -= count;
    if (of_first.agent >= 0) races::finish(of_first.agent, of_first.clocks[done - 1], first + lane);
  }
  of_first.clocks.erase(of_first.clocks.begin(), of_first.clocks.begin() + std::ptrdiff_t(done));
}

}  // namespace emulated

namespace hypermla::cute {

inline void mma_commit() {
  emulated::Products& own = emulated::products[threadIdx.x];
  own.groups.push_back(own.all.size());
  own.clocks.push_back(own.agent < 0 ? 0 : races::begin(own.agent) - 1);
}
template <int pending>
void mma_wait() {
  emulated::meet_warp("wgmma.wait_group", false, [] { emulated::make_products(pending); });
}
template <DType dtype, int n, Major major_b = Major::k, Major major_a = Major::k>
void mma(float* d, u32 a, u32 b, int accumulate) {
  emulated::begin_product<dtype, n, major_b, major_a>(d, nullptr, a, b, accumulate);
}
template <DType dtype, int n, Major major_b = Major::k>
void mma(float* d, const u32* a, u32 b, int accumulate) {
  emulated::begin_product<dtype, n, major_b, Major::k>(d, a, 0, b, accumulate);
}

// widened.h
template <DType dtype>
u32 multiply_both(u32 x, u32 by) {
  const float2 a = unpack<dtype>(x), b = unpack<dtype>(by);
  return pack<dtype>(a.x * b.x, a.y * b.y);
}
inline u32 multiply_halves(u32 x, u32 by) { return multiply_both<DType::float16>(x, by); }
inline u32 multiply_bfloats(u32 x, u32 by) { return multiply_both<DType::bfloat16>(x, by); }
template <DType dtype, int n>
void mma_few(float* d, const u32* a, u32 b, int accumulate) {
  mma<dtype, n>(d, a, b, accumulate);
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
// 2 (l % 4) and the one after it of column l / 4. Products take the registers of all lanes of a warp: what is read for
// them has been read, as every lane knows, once the next group of them is over.
inline void load_transposed(u32 (&a)[4], u32 shared) {
  const int lane = threadIdx.x % 32;
  const auto of_lanes = emulated::exchange("ldmatrix", shared);
  races::reads_beside(emulated::agent_of_products(), dynamic + shared, 16, races::kAll, false);
  const races::Unwatched emulation;
  for (int i = 0; i < 4; ++i) {
    std::uint16_t elements[2];
    for (int e = 0; e < 2; ++e)
      std::memcpy(&elements[e], dynamic + of_lanes[8 * i + lane % 4 * 2 + e] + lane / 4 * 2, 2);
    a[i] = elements[0] | u32{elements[1]} << 16;
  }
}
// The same as it lies there: what a lane holds is its own, so it reads the row that it names.
inline void load_matrices(u32* a, u32 shared) {
  const int lane = threadIdx.x % 32;
  races::reads(dynamic + shared, 16);
  const auto of_lanes = emulated::exchange("ldmatrix", shared);
  const races::Unwatched emulation;
  for (int i = 0; i < 4; ++i) std::memcpy(&a[i], dynamic + of_lanes[8 * i + lane / 4] + lane % 4 * 4, 4);
}
// mma.h. What was read for these products has been read when they are made.
template <DType dtype>
void mma_warp(float* d, const u32* a, u32 b0, u32 b1) {
  const int lane = threadIdx.x % 32, group = lane / 4 * 4, column = lane % 4 * 2;
  float rows[2][16], columns[2][16];
  const auto unpack_into = [](float(&to)[16], int k, u32 word) {
    const float2 both = unpack<dtype>(word);
    to[k] = both.x;
    to[k + 1] = both.y;
  };
  for (int i = 0; i < 2; ++i) {  // the two halves of k
    const auto of_rows = emulated::exchange("mma.sync", a[2 * i] | u64{a[2 * i + 1]} << 32);
    for (int j = 0; j < 4; ++j)
      for (int r = 0; r < 2; ++r) unpack_into(rows[r], 8 * i + 2 * j, u32(of_rows[group + j] >> 32 * r));
  }
  const auto of_columns = emulated::exchange("mma.sync", b0 | u64{b1} << 32);
  for (int c = 0; c < 2; ++c)
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 4; ++j)
        unpack_into(columns[c], 8 * i + 2 * j, u32(of_columns[(column + c) * 4 + j] >> 32 * i));
  for (int r = 0; r < 2; ++r)
    for (int c = 0; c < 2; ++c)
      for (int k = 0; k < 16; ++k) d[2 * r + c] += rows[r][k] * columns[c][k];
  const int agent = emulated::agent_of_products();
  races::finish(agent, races::begin(agent) - 1, threadIdx.x);
}
// An element of an operand whose lines the product runs along, by its descriptor: 8 lines follow each other, and so do
// eights of lines.
inline const unsigned char* operand_place_e4m3(u32 operand, int line_bytes, int row, int k) {
  const u32 at = ((operand & 0x3fff) << 4) + row / 8 * (8 * line_bytes) + row % 8 * line_bytes + k;
  return dynamic + emulated::swizzled_address(at, line_bytes);
}
inline float operand_element_e4m3(u32 operand, int line_bytes, int row, int k) {
  return e4m3_to_float(*operand_place_e4m3(operand, line_bytes, row, k));
}
// These products are made at once, but read until they are waited for, as the others do.
inline void read_beside_e4m3(u32 operand, int line_bytes, int rows = 64) {
  if (threadIdx.x % 32) return;
  for (int row = 0; row < rows; ++row)
    for (int k = 0; k < 32; k += 16)
      races::reads_beside(emulated::agent_of_products(), operand_place_e4m3(operand, line_bytes, row, k), 16);
}
// What an H200 makes of e4m3's products and the sum before them: of each it keeps 13 bits behind the point of the
// largest (docs/log/cute-flash-mla-v2.md, "What a product adds up").
inline float sum_of_e4m3_products(const float (&numbers)[33]) {
  float largest = 0;
  for (const float number : numbers) largest = std::max(largest, std::abs(number));
  if (largest == 0 || !std::isfinite(largest)) return std::accumulate(std::begin(numbers), std::end(numbers), 0.0f);
  const float unit = std::ldexp(1.0f, std::ilogb(largest) - 13);
  float sum = 0;
  for (const float number : numbers) sum += std::trunc(number / unit) * unit;
  return sum;
}
template <int n>
void multiply_e4m3(float* d, const float (&rows)[2][32], u32 b, int line_bytes, int accumulate) {
  const races::Unwatched emulation;
  read_beside_e4m3(b, line_bytes, n);
  for (int i = 0; i < n / 4; ++i) {  // columns of the thread, in pairs
    float numbers[2][33];
    for (int k = 0; k < 32; ++k) {
      const float y = operand_element_e4m3(b, line_bytes, i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2, k);
      for (int half = 0; half < 2; ++half) numbers[half][k] = rows[half][k] * y;
    }
    for (int half = 0; half < 2; ++half) {
      float& to = d[i / 2 * 4 + 2 * half + i % 2];
      numbers[half][32] = accumulate ? to : 0;
      to = sum_of_e4m3_products(numbers[half]);
    }
  }
}
template <Line line>
void mma_e4m3(float* d, u32 a, u32 b, int accumulate) {
  const races::Unwatched emulation;
  constexpr int kBytes = line == Line::bytes_128 ? 128 : 64;
  const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  float rows[2][32];
  read_beside_e4m3(a, kBytes);
  for (int half = 0; half < 2; ++half)
    for (int k = 0; k < 32; ++k) rows[half][k] = operand_element_e4m3(a, kBytes, row + 8 * half, k);
  multiply_e4m3<64>(d, rows, b, kBytes, accumulate);
}
// a (PTX, "Register fragments for wgmma.mma_async.m64nNk32"): four bytes of a register follow each other along k;
// registers 0 and 1 are rows t / 4 and t / 4 + 8 of k = 4 (t % 4) .., 2 and 3 those of k = 16 + 4 (t % 4) ..
template <int n, bool accumulate>
void mma_e4m3(float* d, const u32* a, u32 b) {
  float rows[2][32];
  const int group = threadIdx.x % 32 / 4 * 4;
  for (int i = 0; i < 4; ++i)
    for (int lane = 0; lane < 4; ++lane) {
      const u32 word = __shfl_sync(~0u, a[i], group + lane);
      for (int e = 0; e < 4; ++e)
        rows[i % 2][i / 2 * 16 + 4 * lane + e] = e4m3_to_float(static_cast<unsigned char>(word >> 8 * e));
    }
  multiply_e4m3<n>(d, rows, b, 64, accumulate);
}

}  // namespace hypermla::cute

// Every call has an order of the threads of its own.
inline void emulated::run(int blocks, int threads, const std::function<void()>& kernel) {
  using hypermla::cute::dynamic;
  static unsigned seed = 0;
  const int found = races::found();
  const races::Watched shared(dynamic, sizeof dynamic, true);
  grid.x = blocks;
  for (block.x = 0; block.x < blocks; ++block.x) {
    std::memset(dynamic, 0xff, sizeof dynamic);
    phase_barriers.clear();
    named_barriers.clear();
    warps.assign(threads / 32, Meeting());
    for (auto& of : of_lanes) of.assign(threads, 0);
    products.assign(threads, {});
    races::begin_block(threads);
    Threads::all().run(threads, ++seed, kernel);
    races::end_block();
    for (const Products& of : products)
      if (!of.all.empty()) Threads::all().stop("products that no thread has waited for");
  }
  EXPECT_EQ(races::found(), found);
}
