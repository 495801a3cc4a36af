// The hybrid in one launch: persistent thread blocks take latent and decompressed items from one queue, and who brings
// the last part of a row merges its parts.
//
// Queue: all latent items, then all decompressed ones, drawn from both ends by one 64-bit counter. `streams` thread
// blocks begin at the decompressed end, the others at the latent one, and each goes on to the other kind where its own
// is dry: so it changes its kind once at most. An item is drawn when the loads of the one before it are on their way,
// not earlier, so that all end together.
//   latent        64 rows (head * s + query) of a request over all its latent tokens, as in flash_mla; the item ends
//                 with the value projection (DeepSeek-V2, arXiv 2405.04434): its output, normalised, times w of each
//                 of its heads
//   decompressed  two heads of a request, a tile of their queries, as in flash_attention_v1
// Thread blocks are dealt out GPC by GPC: the streaming ones fill whole GPCs, and no two SMs of a TPC differ in kind.
//
// Merge: where there are both kinds, an item writes 128 columns a row and their log-sum-exp to global memory and adds
// its rows to the counter of every tile of 64 rows that it touches. Who completes a counter (each row twice) merges the
// tile's rows by log-sum-exp and sets the counter back. That is done by a warp of its own, beside the next item. With
// one kind alone the items write the output.
//
// Roles (384 threads)    latent                                    decompressed
//   warpgroups 0, 1      math (latent/attend_latent.cuh)           teams (decompressed/attend_few.cuh)
//   warp 8               draws; loads queries, tokens, w           draws; loads keys and values of team 0
//   warps 9, 10                                                    keys and values of team 1; RoPE keys and queries
//   warp 11              merges                                    merges
//
// Value projection: w of a head, 512 x 128, follows the tokens through the two slots, rows 0..255 through slot 0 for
// warpgroup 0, which holds these columns of the output, the others through slot 1 for warpgroup 1. Each has then a part
// of all 128 columns; they exchange halves through the first pair of boxes of their slots. A tile of several heads
// (s < 64) takes the products of all its rows with the w of one head after the other and keeps those of its rows.
//
// Shared memory: that of the kind at work, and behind both Control. Barriers are made anew for each kind.
// grid = any; 384 threads, kMlaVar6PlusV6SharedBytes of dynamic shared memory.
#pragma once

#include "decompressed/attend_few.cuh"
#include "latent/attend_latent.cuh"
#include "mla_var6_plus_v6.h"

namespace hypermla::cute {

using decompressed::kTeams;
using NewItem = decompressed::Item;
template <int places>
using Ring = decompressed::Ring<places>;

inline constexpr int kPlaces = 2;  // for drawn items: that at work, and the next one
inline constexpr int kColumns = 128;
// Of a thread. Teams of 64 rows keep their queries in registers; then the warp that merges has fewer.
constexpr int math_registers(int rows) { return rows == 64 ? 216 : 208; }
constexpr int loader_registers(int rows) { return rows == 64 ? 72 : 88; }
constexpr int merged_rows(int rows) { return rows == 64 ? 2 : 4; }  // that a thread has on their way
inline constexpr float kMinusInfinity = -__builtin_bit_cast(float, 0x7f800000);
inline constexpr float kNatural = 0.693147180559945f, kBinary = 1.442695040888963f;  // logarithms: ln 2, log2 e

struct Control {
  static constexpr u32 begin = 230848;  // behind the shared memory of both kinds
  static constexpr u32 items = begin, next = items + kPlaces * 32, barriers = next + 64, end = barriers + 64;

  u32 base;
  __device__ u32 item_full(int place) const { return base + barriers + place * 8; }
  __device__ u32 item_empty(int place) const { return item_full(kPlaces + place); }
  // The outputs of the item in a place are written, of a team of it or (team 0) of a latent one.
  __device__ u32 written(int place, int team) const { return item_full((2 + team) * kPlaces + place); }
};
static_assert(latent::SharedPlan::bytes <= Control::begin && decompressed::SharedPlan<16>::bytes <= Control::begin &&
              decompressed::SharedPlan<32>::bytes <= Control::begin &&
              decompressed::SharedPlan<64>::bytes <= Control::begin);
static_assert(Control::end == kMlaVar6PlusV6SharedBytes && kMlaVar6PlusV6SharedBytes <= 232448);

struct Queue {
  u64* drawn;  // from the front in the low half, from the back in the high half; every launch leaves it 0
  int latent, all;

  // The next item of the end; -1: there is none, which every thread block learns once.
  __device__ int draw(bool front) const {
    const u64 before = atomicAdd(drawn, front ? 1ull : 1ull << 32);
    const int of_front = static_cast<int>(before), of_back = static_cast<int>(before >> 32), sum = of_front + of_back;
    if (sum == all + static_cast<int>(gridDim.x) - 1) *drawn = 0;
    return sum >= all ? -1 : front ? of_front : all - 1 - of_back;
  }
};

// What the kernel is about, and which item is what.
struct Work {
  int b, h, s, latent_tokens, new_tokens;
  const int* __restrict__ lengths;
  const int* __restrict__ new_lengths;
  Queue queue;

  __device__ int rows() const { return h * s; }
  __device__ int tiles() const { return (rows() + 63) / 64; }
  // The heads that the rows of a latent tile belong to.
  __device__ int first_head(int tile) const { return tile * 64 / s; }
  __device__ int last_head(int tile) const { return min(tile * 64 + 63, rows() - 1) / s; }

  // The tiles of a request follow each other and so share its tokens in L2.
  __device__ WorkItem latent_item(int index) const {
    if (index < 0 || index >= queue.latent) return {0, 0, 0, 0, 0, -1, {}};
    const int request = index / tiles(), tokens = lengths ? lengths[request] : latent_tokens;
    return {request, index % tiles(), 0, max(1, (tokens + 63) / 64), tokens, -1, {}};
  }
  template <int N, bool causal>
  __device__ NewItem new_item(int index) const {
    if (index < queue.latent) return {-1, 0, 0, 0, 0, {}};
    return decompressed::ItemOrder<N>{b, h, s, new_tokens, new_lengths}.template at<causal>(queue.all - 1 - index);
  }
};

// The thread that draws: it leaves each item in its place for the others.
struct Drawing {
  unsigned char* shared;
  Control control;
  const Work& work;
  bool front;
  int index;  // drawn and not yet left: the first of this kind
  Ring<kPlaces> ring = {0, 1};

  __device__ int next_index() {
    const int now = index >= 0 ? index : work.queue.draw(front);
    index = -1;
    return now;
  }
  template <class Item>
  __device__ void leave(const Item& item, bool closing, int drawn) {
    barrier_wait(control.item_empty(ring.place), ring.phase);
    *reinterpret_cast<Item*>(shared + Control::items + ring.place * 32) = item;
    if (closing) *reinterpret_cast<volatile int*>(shared + Control::next) = drawn;
    barrier_arrive(control.item_full(ring.place));
    ring.next();
  }
};

// Latent items like a pointer into a list: as the thread that draws sees them, and as the math warpgroups do.
struct DrawnLatent {
  Drawing drawing;
  WorkItem item = {};

  __device__ const WorkItem& operator*() const { return item; }
  __device__ void operator++() {
    const int index = drawing.next_index();
    item = drawing.work.latent_item(index);
    drawing.leave(item, item.begin == item.end, index);
  }
};
struct LeftLatent {
  const unsigned char* shared;
  Control control;
  Ring<kPlaces> ring = {};

  __device__ void wait() const { barrier_wait(control.item_full(ring.place), ring.phase); }
  __device__ const WorkItem& operator*() const {
    return *reinterpret_cast<const WorkItem*>(shared + Control::items + ring.place * 32);
  }
  __device__ const WorkItem* operator->() const { return &**this; }
  __device__ void operator++() {
    ring.next();
    wait();
  }
  __device__ void done() const { barrier_arrive(control.written(ring.place, 0)); }
};

// Decompressed items: as the thread that draws sees them, and as the others do.
template <int N, bool causal>
struct DrawnNew {
  Drawing drawing;

  __device__ NewItem next() {
    const int index = drawing.next_index();
    const NewItem item = drawing.work.new_item<N, causal>(index);
    drawing.leave(item, item.request < 0, index);
    return item;
  }
};
template <bool loads>  // a loader has no more to do with the place once it has read the item
struct LeftNew {
  const unsigned char* shared;
  Control control;
  Ring<kPlaces> ring = {};
  int place = 0;

  __device__ __forceinline__ NewItem next() {
    place = ring.place;
    barrier_wait(control.item_full(place), ring.phase);
    const NewItem item = *reinterpret_cast<const NewItem*>(shared + Control::items + place * 32);
    if (loads) barrier_arrive(control.item_empty(place));
    ring.next();
    return item;
  }
  __device__ __forceinline__ void done(int team) const { barrier_arrive(control.written(place, team)); }
};

// Where row head * s + query of a request lies: [B, H, S] or [B, S, H].
struct RowOrder {
  int h, s;
  bool tokens_first;

  __device__ long long at(int request, int row) const {
    const long long first = static_cast<long long>(request) * h * s;
    return first + (tokens_first ? row % s * h + row / s : row);
  }
};

// The outputs of latent items, through the value projection.
template <DType dtype>
struct Projected {
  static constexpr bool kFinishes = true;
  const Work& work;
  RowOrder order;
  unsigned short* o;
  float* lse;

  template <int half>
  __device__ __forceinline__ void finish(float* o_latent, float max0, float max1, float sum0, float sum1,
                                         unsigned char* shared, const latent::SharedPlan& plan, u32& phase,
                                         u32& exchange_phase, const LeftLatent& left) const {
    using namespace latent;
    auto release = [](u32 barrier) {
      if (lane_id() == 0) barrier_arrive(barrier);
    };
    release(plan.empty(1, 2 * half));
    release(plan.empty(1, 2 * half + 1));
    release(plan.empty(1, latent::kRope));
    u32 a[64];  // (64, 256) of the normalised output, as the A operand
    const float shrink0 = sum0 == 0.0f ? 0.0f : 1.0f / sum0, shrink1 = sum1 == 0.0f ? 0.0f : 1.0f / sum1;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      a[2 * i] = pack<dtype>(o_latent[4 * i] * shrink0, o_latent[4 * i + 1] * shrink0);
      a[2 * i + 1] = pack<dtype>(o_latent[4 * i + 2] * shrink1, o_latent[4 * i + 3] * shrink1);
    }
    const int lane = lane_id(), rows = work.rows(), request = uniform(left->request), tile = uniform(left->row_tile);
    const int row =
        tile * 64 + ((thread_id() >> 5) & 3) * 16 + (lane >> 2);  // of this thread's first row; the second is 8 on
    if (half == 0 && (lane & 3) == 0) {
      float* of = lse + static_cast<long long>(request) * rows;
      if (row < rows) of[row] = sum0 == 0.0f ? kMinusInfinity : (max0 + log2_fast(sum0)) * kNatural;
      if (row + 8 < rows) of[row + 8] = sum1 == 0.0f ? kMinusInfinity : (max1 + log2_fast(sum1)) * kNatural;
    }

    // Of 128 columns of a head 64 are this warpgroup's to finish; the others' sums go to the other one.
    constexpr int kGiven = 32 * (1 - half), kKept = 32 * half;
    float4* give = reinterpret_cast<float4*>(shared + SharedPlan::slots + half * kOperandBytes) + (thread_id() & 127);
    const float4* take =
        reinterpret_cast<const float4*>(shared + SharedPlan::slots + (1 - half) * kOperandBytes) + (thread_id() & 127);
    const u32 w = operand_mn_major(plan.slot(half));
    const int last_head = uniform(work.last_head(tile));
#pragma unroll 1
    for (int head = uniform(work.first_head(tile)); head <= last_head; ++head) {
      float d[64] = {};  // (64, 128), of this warpgroup's latent columns
#pragma unroll
      for (int pair = 0; pair < latent::kRope; ++pair) {
        barrier_wait(plan.full(half, pair), phase);
        mma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
          mma_64x128<dtype>(d, a + 16 * pair + 4 * i, w + pair * 2 * kNextBox + 128 * i, pair != 0 || i != 0);
        mma_commit();
      }
      barrier_wait(plan.full(0, latent::kRope), phase);
      barrier_wait(plan.full(1, latent::kRope), phase);
      mma_wait<0>();
      pin<64>(d);
      release(plan.empty(half, 1));
      release(plan.empty(half, 2));
      release(plan.empty(half, 3));
      release(plan.empty(0, latent::kRope));
      release(plan.empty(1, latent::kRope));
      barrier_arrive(plan.weights_ready(half));  // none, but the barrier's phase has to keep step
      barrier_wait(plan.weights_ready(1 - half), phase);
      phase ^= 1;

      named_sync<kWarpgroup0 + half, 128>();  // all warps have read the first pair of boxes
#pragma unroll
      for (int i = 0; i < 8; ++i)
        give[i * 128] =
            make_float4(d[kGiven + 4 * i], d[kGiven + 4 * i + 1], d[kGiven + 4 * i + 2], d[kGiven + 4 * i + 3]);
      async_fence();
      barrier_arrive(plan.exchanged());
      barrier_wait(plan.exchanged(), exchange_phase);
      exchange_phase ^= 1;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 x = take[i * 128];
        d[kKept + 4 * i] += x.x;
        d[kKept + 4 * i + 1] += x.y;
        d[kKept + 4 * i + 2] += x.z;
        d[kKept + 4 * i + 3] += x.w;
      }
      async_fence();
      __syncwarp();
      release(plan.empty(1 - half, 0));

      // Four threads hold two columns of a row each: they exchange among four such groups, and each stores 16 bytes.
      auto exchange = [&](u32& low, u32& high, int bit) {
        const u32 other = __shfl_xor_sync(~0u, lane & bit ? low : high, bit);
        (lane & bit ? low : high) = other;
      };
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const int r = row + 8 * second;
        uint4* to = reinterpret_cast<uint4*>(o + order.at(request, r) * kColumns + half * 64) + (lane & 3);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          u32 x[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float* from = d + kKept + 16 * i + 4 * j + 2 * second;
            x[j] = pack<dtype>(from[0], from[1]);
          }
          exchange(x[0], x[1], 1);
          exchange(x[2], x[3], 1);
          exchange(x[0], x[2], 2);
          exchange(x[1], x[3], 2);
          if (r >= head * work.s && r < (head + 1) * work.s) to[i * 4] = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    }
    left.done();
  }
};

// The outputs of decompressed items.
struct NewOutputs {
  const TensorMap& o_map;
  RowOrder order;
  unsigned short* o;
  float* lse;

  __device__ int row_stride() const { return order.tokens_first ? order.h * kColumns : kColumns; }
  __device__ unsigned short* rows_at(int head, int row) const {
    return o + order.at(head / order.h, head % order.h * order.s + row) * kColumns;
  }
  __device__ void store_box(u32 staging, int row, int head) const {
    tma_store(o_map, staging, row, head % order.h * (order.tokens_first ? 2 : 2 * order.s), head / order.h);
    tma_store_wait();  // to the end: who merges may read it
  }
};

// The warp that merges: both parts of a row, normalised, and their log-sum-exps. What takes the time is the latency of
// loads.
template <DType dtype, int kBatch>
struct Merging {
  const unsigned short* o_latent;
  const unsigned short* o_new;
  const float* lse_latent;
  const float* lse_new;
  unsigned short* __restrict__ o;
  float* __restrict__ lse;
  int* counters;  // [request][tile] rows that arrived; every launch leaves them 0
  RowOrder order;
  int rows;


  // One part of the rows from `first` to `last` of a request is written.
  __device__ void arrive(int request, int first, int last) const {
    const int lane = lane_id();
    __threadfence();
    for (int tile = first / 64; tile * 64 < last; ++tile) {
      const int begin = tile * 64, end = min(begin + 64, rows), here = min(last, end) - max(first, begin);
      int* counter = counters + static_cast<long long>(request) * ((rows + 63) / 64) + tile;
      int before = 0;
      if (lane == 0) before = atomicAdd(counter, here);
      if (__shfl_sync(~0u, before, 0) + here < 2 * (end - begin)) continue;
      __threadfence();
      if (lane == 0) *counter = 0;
      merge(request, begin, end);
    }
  }
  __device__ void merge(int request, int begin, int end) const {
    const int lane = lane_id(), column = lane % 16 * 8;
    const long long first_row = static_cast<long long>(request) * rows;
#pragma unroll 1
    for (int first = begin; first < end; first += 32) {
      // The weights of a row are with one lane, its columns with 16 lanes.
      float p = 0.0f, q = 0.0f;
      if (first + lane < end) {
        const long long row = first_row + first + lane;
        const float a = __ldcg(lse_latent + row), b = __ldcg(lse_new + row);
        const float top = fmaxf(fmaxf(a, b), latent::kLowest);
        p = exp2_fast((a - top) * kBinary);
        q = exp2_fast((b - top) * kBinary);
        const float total = p + q, inverse = total == 0.0f ? 0.0f : __fdividef(1.0f, total);
        lse[row] = total == 0.0f ? kMinusInfinity : top + log2_fast(total) * kNatural;
        p *= inverse;
        q *= inverse;
      }
#pragma unroll 1
      for (int i = lane / 16; i < 32; i += 2 * kBatch) {
        uint4 x[kBatch], y[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const long long at = (first_row + min(first + i + 2 * j, end - 1)) * kColumns + column;
          x[j] = __ldcg(reinterpret_cast<const uint4*>(o_latent + at));
          y[j] = __ldcg(reinterpret_cast<const uint4*>(o_new + at));
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const float of_x = __shfl_sync(~0u, p, i + 2 * j), of_y = __shfl_sync(~0u, q, i + 2 * j);
          auto both = [&](u32 u, u32 v) {
            const float2 f = unpack<dtype>(u), g = unpack<dtype>(v);
            return pack<dtype>(of_x * f.x + of_y * g.x, of_x * f.y + of_y * g.y);
          };
          if (first + i + 2 * j < end)
            *reinterpret_cast<uint4*>(o + order.at(request, first + i + 2 * j) * kColumns + column) =
                make_uint4(both(x[j].x, y[j].x), both(x[j].y, y[j].y), both(x[j].z, y[j].z), both(x[j].w, y[j].w));
        }
      }
    }
  }
};

// Waits for what items write, and gives their places free.
template <bool both, class Merging>
__device__ __forceinline__ void merge_latent(const unsigned char* shared, const Control control,
                                             const Merging& merging) {
  LeftLatent left{shared, control};
  for (left.wait(); left->begin != left->end; ++left) {
    const int request = left->request, first = left->row_tile * 64;
    barrier_wait(control.written(left.ring.place, 0), left.ring.phase);
    if (both) merging.arrive(request, first, min(first + 64, merging.rows));
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(control.item_empty(left.ring.place));
  }
}
template <int N, bool both, class Merging>
__device__ __forceinline__ void merge_new(const unsigned char* shared, const Control control, const Merging& merging) {
  LeftNew<false> left{shared, control};
  for (;;) {
    const u32 phase = left.ring.phase;
    const NewItem item = left.next();
    if (item.request < 0) break;
    for (int team = 0; team < kTeams; ++team) {
      barrier_wait(control.written(left.place, team), phase);
      if (!both || item.head + team >= merging.order.h) continue;
      const int first = (item.head + team) * merging.order.s + item.row;
      merging.arrive(item.request, first, first + min(N, merging.order.s - item.row));
    }
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(control.item_empty(left.place));
  }
}

// The thread that loads RoPE keys and queries. The queries' place is free later than that of the first RoPE keys.
template <int N>
__device__ __forceinline__ void load_ropes_and_queries(const decompressed::SharedPlan<N> plan, LeftNew<true> items,
                                                       const TensorMap& kpe_map, const TensorMap& q_map,
                                                       const TensorMap& qpe_map, int h) {
  using Plan = decompressed::SharedPlan<N>;
  Ring<Plan::kRopes> ring{0, 1};
  Ring<Plan::kQueries> queries{0, 1};
  for (;;) {
    const NewItem item = items.next();
    if (item.request < 0) break;
    for (int block = 0; block < item.blocks; ++block) {
      barrier_wait(plan.rope_empty(ring.place), ring.phase);
      barrier_expect(plan.rope_full(ring.place), kBoxBytes);
      tma_load(plan.rope(ring.place), kpe_map, block * 64, 0, item.request, plan.rope_full(ring.place));
      ring.next();
      if (block > 0) continue;
#pragma unroll
      for (int team = 0; team < kTeams; ++team) {
        const int head = item.request * h + min(item.head + team, h - 1);
        const u32 full = plan.query_full(team), to = plan.query(team);
        barrier_wait(plan.query_empty(team), queries.phase);
        barrier_expect(full, 3 * Plan::kRowBytes);
        tma_load(to, q_map, item.row, 0, head, full);
        tma_load(to + 2 * Plan::kRowBytes, qpe_map, item.row, 0, head, full);
        queries.next();
      }
    }
  }
}

// The barriers of each kind and how many arrive at them.
template <class Visit>
__device__ __forceinline__ void latent_barriers(const latent::SharedPlan& plan, const Control& control, Visit visit) {
#pragma unroll 1
  for (int pair = 0; pair < latent::kBoxPairs; ++pair) {
    for (int slot = 0; slot < 2; ++slot) {
      visit(plan.full(slot, pair), 1);
      visit(plan.empty(slot, pair), pair == latent::kRope ? 8 : 4);
    }
    visit(plan.queries_full(pair), 1);
  }
  visit(plan.weights_ready(0), 128);
  visit(plan.weights_ready(1), 128);
  visit(plan.exchanged(), 256);
  visit(plan.queries_empty(), 8);
  for (int place = 0; place < kPlaces; ++place) {
    visit(control.item_full(place), 1);
    visit(control.item_empty(place), 1);
    visit(control.written(place, 0), 256);
  }
}
template <int N, class Visit>
__device__ __forceinline__ void new_barriers(const decompressed::SharedPlan<N>& plan, const Control& control,
                                             Visit visit) {
  using Plan = decompressed::SharedPlan<N>;
#pragma unroll 1
  for (int team = 0; team < kTeams; ++team) {
#pragma unroll 1
    for (int place = 0; place < Plan::kRing; ++place) {
      visit(plan.full(team, place), 1);
      visit(plan.empty(team, place), 4);
    }
    visit(plan.query_full(team), 1);
  }
  for (int place = 0; place < Plan::kQueries; ++place) visit(plan.query_empty(place), 4);
#pragma unroll 1
  for (int place = 0; place < Plan::kRopes; ++place) {
    visit(plan.rope_full(place), 1);
    visit(plan.rope_empty(place), 4 * kTeams);
  }
  for (int place = 0; place < kPlaces; ++place) {
    visit(control.item_full(place), 1);
    visit(control.item_empty(place), 3);  // two that load, and the one that merges
    for (int team = 0; team < kTeams; ++team) visit(control.written(place, team), 128);
  }
}

enum Kind { kLatent, kNew, kNothing };

// What latent/attend_latent.cuh asks for. A mask never ends among latent tokens, unless there are no others.
struct LatentProblem {
  DType dtype;
  bool causal, after = false;
  int page = 0;
};
struct LatentTiling {
  bool evict_first = false;
};

// What is latent: qc_map, qpe_rows_map, z_map, kpe_map as in flash_mla; w_map: [H, 512, 128], boxes of 64 rows and 2
// groups of columns. What is decompressed: q_map, qpe_map, k_map, kpe_new_map, v_map as in flash_attention_v1;
// o_new_map: (64 columns, query, 64 columns of a query of a head, request), boxes of `rows` queries and 2 groups, of
// o_new [B, H, S, 128] or, where all tokens are decompressed, of o. Parts, where there are both: o_latent, o_new
// [B, H, S, 128], lse_latent, lse_new [B, H, S], natural logarithms; o [B, H, S, 128] or [B, S, H, 128], lse [B, H, S].
// lengths, new_lengths [B]: tokens of each request; null: latent_tokens and new_tokens each. counters: a 64-bit word,
// then an int for each request and tile of 64 rows, all 0 before the first launch; every launch leaves them so.
// scale_log2 = scale * log2(e) > 0. problem.n: 0 without decompressed tokens, problem.t: problem.n without latent ones.
template <MlaVar6PlusV6Problem problem, MlaVar6PlusV6Tiling tiling>
__global__ void __launch_bounds__(384, 1)
    mla_var6_plus_v6(const __grid_constant__ TensorMap qc_map, const __grid_constant__ TensorMap qpe_rows_map,
                     const __grid_constant__ TensorMap z_map, const __grid_constant__ TensorMap kpe_map,
                     const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap q_map,
                     const __grid_constant__ TensorMap qpe_map, const __grid_constant__ TensorMap k_map,
                     const __grid_constant__ TensorMap kpe_new_map, const __grid_constant__ TensorMap v_map,
                     const __grid_constant__ TensorMap o_new_map, unsigned short* o_latent, float* lse_latent,
                     unsigned short* o_new, float* lse_new, unsigned short* o, float* lse, const int* lengths,
                     const int* new_lengths, u64* counters, float scale_log2, int b, int h, int s, int latent_tokens,
                     int new_tokens, int tokens_first, int streams, int latent_items, int all_items) {
  static_assert(problem.d == 128 && problem.p == 64 && problem.k == 512, "the layouts are made for these dimensions");
  constexpr bool has_latent = problem.t > problem.n, has_new = problem.n > 0, both = has_latent && has_new;
  constexpr DType dtype = problem.dtype;
  constexpr LatentProblem latent_problem{dtype, problem.causal && !has_new};
  constexpr LatentTiling latent_tiling{};
  constexpr int N = tiling.rows;
  // Keys and values pass through L2 once; w of a head is read again for every request, with all of them between.
  constexpr Keep kStream = both ? Keep::evict_first : Keep::normal, kMatrix = both ? Keep::evict_last : Keep::normal;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Control control{shared_address(shared)};
  const latent::SharedPlan latent_plan{control.base};
  const decompressed::SharedPlan<N> new_plan{control.base};
  const Work work{b, h, s, latent_tokens, new_tokens, lengths, new_lengths, {counters, latent_items, all_items}};
  const RowOrder order{h, s, tokens_first != 0}, of_parts{h, s, tokens_first && !both};
  volatile int* next = reinterpret_cast<volatile int*>(shared + Control::next);
  const bool front = static_cast<int>(blockIdx.x) >= streams;
  const int role = uniform(static_cast<int>(threadIdx.x >> 7));

  if (threadIdx.x == 256) *next = work.queue.draw(front);
  // All threads meet, and one of the loaders makes the barriers of the next item's kind.
  Kind before = kNothing;
  auto turn = [&](bool loads) {
    async_fence();  // copies of this kind may go where the threads of the last one read and wrote
    __syncwarp();
    __syncthreads();
    const int index = uniform(*next);
    const Kind kind = index < 0 ? kNothing : index < latent_items ? kLatent : kNew;
    if (loads && threadIdx.x == 256) {
      auto init = [](u32 barrier, u32 arrivals) { barrier_init(barrier, arrivals); };
      auto drop = [](u32 barrier, u32) { barrier_drop(barrier); };
      if (has_latent && before == kLatent) latent_barriers(latent_plan, control, drop);
      if (has_new && before == kNew) new_barriers(new_plan, control, drop);
      if (has_latent && kind == kLatent) latent_barriers(latent_plan, control, init);
      if (has_new && kind == kNew) new_barriers(new_plan, control, init);
      barrier_init_done();
    }
    before = kind;
    __syncthreads();
    return kind;
  };

  auto math = [&]<int half>() {
    auto attend_latent = [&] {
      LeftLatent left{shared, control};
      left.wait();
      const Projected<dtype> output{work, of_parts, both ? o_latent : o, both ? lse_latent : lse};
      latent::attend<latent_problem, latent_tiling, half>(shared, latent_plan, left, output, scale_log2, s);
    };
    auto attend_new = [&] {
      const LeftNew<false> left{shared, control};
      const NewOutputs output{o_new_map, of_parts, both ? o_new : o, both ? lse_new : lse};
      if constexpr (N < 64) {
        decompressed::attend_swapped<problem, tiling>(half, shared, new_plan, left, output, scale_log2, h, s);
      } else {
        decompressed::attend<problem, tiling>(half, new_plan, left, output, scale_log2, h, s);
      }
    };
    for (;;) {
      const Kind kind = turn(false);
      if (kind == kNothing) break;
      if (kind == kLatent) {
        if constexpr (has_latent) attend_latent();
      } else {
        if constexpr (has_new) attend_new();
      }
    }
  };
  if (role == 0) {
    take_registers<math_registers(N)>();
    math.template operator()<0>();
  } else if (role == 1) {
    take_registers<math_registers(N)>();
    math.template operator()<1>();
  } else {
    give_registers<loader_registers(N)>();
    const int warp = uniform(static_cast<int>(threadIdx.x >> 5)) - 8;
    const Merging<dtype, merged_rows(N)> merging{
        o_latent, o_new, lse_latent, lse_new, o, lse, reinterpret_cast<int*>(counters + 1), order, h * s};
    for (;;) {
      const Kind kind = turn(true);
      if (kind == kNothing) break;
      if (warp == 3) {
        if constexpr (has_latent)
          if (kind == kLatent) merge_latent<both>(shared, control, merging);
        if constexpr (has_new)
          if (kind == kNew) merge_new<N, both>(shared, control, merging);
        continue;
      }
      if (lane_id() != 0) continue;
      if (kind == kLatent) {
        if constexpr (has_latent) {
          if (warp != 0) continue;
          DrawnLatent drawn{{shared, control, work, front, *next}};
          ++drawn;
          latent::load<latent_problem, latent_tiling>(
              latent_plan, drawn,
              [&](const WorkItem& item, u32& phase) {  // w of its heads
                for (int head = work.first_head(item.row_tile); head <= work.last_head(item.row_tile); ++head) {
                  for (int slot = 0; slot < 2; ++slot) {
                    for (int i = 0; i < latent::kBoxPairs; ++i) {
                      const int pair = latent::order_of_release(slot, i);
                      const u32 full = latent_plan.full(slot, pair);
                      barrier_wait(latent_plan.empty(slot, pair), phase);
                      if (pair == latent::kRope) {
                        barrier_arrive(full);
                      } else {
                        barrier_expect(full, 2 * kBoxBytes);
                        tma_load<kMatrix>(latent_plan.slot(slot) + 2 * pair * kBoxBytes, w_map, slot * 256 + pair * 64,
                                          0, head, full);
                      }
                    }
                  }
                  phase ^= 1;
                }
              },
              qc_map, qpe_rows_map, z_map, kpe_map, nullptr, 0);
        }
      } else if constexpr (has_new) {
        if (warp == 0) {
          decompressed::load_tokens<kStream>(
              0, new_plan, DrawnNew<N, problem.causal>{{shared, control, work, front, *next}}, k_map, v_map, h);
        } else if (warp == 1) {
          decompressed::load_tokens<kStream>(1, new_plan, LeftNew<true>{shared, control}, k_map, v_map, h);
        } else {
          load_ropes_and_queries(new_plan, LeftNew<true>{shared, control}, kpe_new_map, q_map, qpe_map, h);
        }
      }
    }
  }
}

}  // namespace hypermla::cute
