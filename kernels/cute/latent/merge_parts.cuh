// Partial outputs merged by their log-sum-exp: what the combine kernels of the latent kernels share. A thread holds
// four values each of two rows of a tile, and the parts of a tile lie at equal distances.
#pragma once

#include "hopper/constants.h"
#include "hopper/fragments.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "latent/arguments.h"

namespace hypermla::cute::latent {

// Loads that are issued one after the other whatever they bring: left to itself, the compiler waits for one before it
// asks for the next, for want of registers. What is not wanted is 0 / -inf.
__device__ __forceinline__ uint4 load_at_once(const uint4* from, bool wanted) {
  uint4 x = {};
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.volatile.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
               : "l"(from), "r"(static_cast<int>(wanted)));
  return x;
}
__device__ __forceinline__ float load_at_once(const float* from, bool wanted) {
  float x = -kInfinity;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.volatile.global.f32 %0, [%1];\n}"
               : "+f"(x)
               : "l"(from), "r"(static_cast<int>(wanted)));
  return x;
}

// Weighted sums, and of each row the largest log-sum-exp (log2) and the sum of the weights relative to it.
struct Merged {
  float4 first = {}, second = {};
  float2 top = {kLeastScore, kLeastScore}, total = {};

  __device__ void rescale(float2 to) {
    const float a = exp2_fast(top.x - to.x), b = exp2_fast(top.y - to.y);
    first = {first.x * a, first.y * a, first.z * a, first.w * a};
    second = {second.x * b, second.y * b, second.z * b, second.w * b};
    total = {total.x * a, total.y * b};
    top = to;
  }
  // Words of 16-bit elements: two of the first row, two of the second, and again.
  template <DType dtype>
  __device__ void add(uint4 x, float2 w) {
    const float2 a = unpack<dtype>(x.x), b = unpack<dtype>(x.y), c = unpack<dtype>(x.z), d = unpack<dtype>(x.w);
    first = {first.x + w.x * a.x, first.y + w.x * a.y, first.z + w.x * c.x, first.w + w.x * c.y};
    second = {second.x + w.y * b.x, second.y + w.y * b.y, second.z + w.y * d.x, second.w + w.y * d.y};
    total = {total.x + w.x, total.y + w.y};
  }
  __device__ void add(Merged other) {
    const float2 best = {fmaxf(top.x, other.top.x), fmaxf(top.y, other.top.y)};
    rescale(best);
    other.rescale(best);
    const float4 &x = other.first, &y = other.second;
    first = {first.x + x.x, first.y + x.y, first.z + x.z, first.w + x.w};
    second = {second.x + y.x, second.y + y.y, second.z + y.z, second.w + y.w};
    total = {total.x + other.total.x, total.y + other.total.y};
  }
  __device__ void normalise() {
    const float a = total.x == 0.0f ? 0.0f : 1.0f / total.x, b = total.y == 0.0f ? 0.0f : 1.0f / total.y;
    first = {first.x * a, first.y * a, first.z * a, first.w * a};
    second = {second.x * b, second.y * b, second.z * b, second.w * b};
  }
  // Of the merged rows, in `unit` per log2; `empty` without tokens.
  __device__ float2 lse(float unit, float empty) const {
    return {total.x == 0.0f ? empty : (top.x + log2_fast(total.x)) * unit,
            total.y == 0.0f ? empty : (top.y + log2_fast(total.y)) * unit};
  }
};

// Groups of 128 threads that merge the parts of a unit together. `size`: how many, a power of two.
struct Team {
  int size;
  __device__ __forceinline__ int member() const { return threadIdx.x >> 7 & (size - 1); }  // this thread's group
  __device__ __forceinline__ int number() const { return (threadIdx.x >> 7) / static_cast<unsigned>(size); }
  __device__ __forceinline__ int teams() const { return (blockDim.x >> 7) / static_cast<unsigned>(size); }
};

// Merges the parts 0 .. slots - 1, four at a time, of which the groups of a team take turns. part(first, i, wanted) and
// lse(first, i, wanted) load what Merged adds of part first + i; i is known to the compiler, an offset in the load.
// `others` [all groups but one of each team][128] is shared memory. The result is that of the team's first group.
template <DType dtype, class Part, class Lse>
__device__ __forceinline__ Merged merge(int slots, Team team, Merged* others, Part part, Lse lse) {
  constexpr int kBatch = 4;
  const int thread = threadIdx.x & 127;
  Merged all;
#pragma unroll 1
  for (int first = team.member() * kBatch; first < slots; first += kBatch * team.size) {
    uint4 x[kBatch];
    float2 of[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) x[i] = part(first, i, first + i < slots);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) of[i] = lse(first, i, first + i < slots);
    float2 top = all.top;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) top = {fmaxf(top.x, of[i].x), fmaxf(top.y, of[i].y)};
    all.rescale(top);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) all.add<dtype>(x[i], {exp2_fast(of[i].x - top.x), exp2_fast(of[i].y - top.y)});
  }
  if (team.size > 1) {
    others += team.number() * (team.size - 1) * 128 + thread;
    auto meet = [&] { named_sync(1 + team.number(), team.size * 128); };
    meet();  // those of the unit before have been read
    if (team.member() > 0) others[(team.member() - 1) * 128] = all;
    meet();
#pragma unroll 1
    for (int g = 0; g < team.size - 1 && team.member() == 0; ++g) all.add(others[g * 128]);
  }
  all.normalise();
  return all;
}

// The work of a merging kernel: every tile falls into `units`, a power of two, of which a thread block takes some at a
// time. The more parts, the more groups of 128 threads merge those of a unit. In which order parts are added follows
// from their number and from the number of groups. unit(item, unit, writes, merge) merges by merge(part, lse), as
// above, and writes the result if it gets one.
template <DType dtype, class Unit>
__device__ __forceinline__ void for_each_unit(const CombineArguments& with, int units, Merged* others, Unit unit) {
  const int all = (with.count ? *with.count : with.item_count) * units;
  int at_once = 1;
  while (at_once < units && all > at_once * static_cast<int>(gridDim.x)) at_once *= 2;
  int at = blockIdx.x * at_once;
  CombineItem item = {};
  if (at < all) item = with.items[at / static_cast<unsigned>(units)];  // made long ago: no need to wait
  // The arguments that are read after the wait come into the constant cache before it.
  asm volatile("" ::"l"(with.o), "l"(with.o_rows.outer_stride), "l"(with.lse_rows.outer_stride), "f"(with.lse_unit));
  launch_next();
  wait_for_previous();  // also without work: a kernel that waits for this one relies on the kernel before, too
#pragma unroll 1
  while (at < all) {
    const Team team{min(groups_for(item.slots), static_cast<int>(blockDim.x) >> 7)};
#pragma unroll 1
    for (int i = item.slots > 0 ? team.number() : at_once; i < at_once; i += team.teams()) {
      unit(item, (at & (units - 1)) + i, team.member() == 0,
           [&](auto part, auto lse) { return merge<dtype>(item.slots, team, others, part, lse); });
    }
    at += gridDim.x * at_once;
    if (at < all) item = with.items[at / static_cast<unsigned>(units)];
  }
}

}  // namespace hypermla::cute::latent
