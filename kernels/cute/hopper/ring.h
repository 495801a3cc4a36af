// A ring of stages in shared memory between a producer and its consumers: each stage has a barrier for "full" and one
// for "empty". Which stage is next, and in which phase its barriers are, is kept here and nowhere else.
#pragma once

#include "mbarrier.h"

namespace hypermla::cute {

// The barriers of `rings` rings alike.
template <int stages, int rings = 1>
struct RingBarriers {
  Array<Barrier, 2 * rings * stages> barriers;

  __device__ __forceinline__ u32 full(int ring, int stage) const { return barriers[ring * stages + stage]; }
  __device__ __forceinline__ u32 empty(int ring, int stage) const { return full(rings + ring, stage); }
  // Arrivals that make a stage full: the producers'; empty: the consumers'. One thread, at the start of the kernel.
  __device__ void init(u32 producers, u32 consumers) const {
    for (int ring = 0; ring < rings; ++ring) {
      for (int stage = 0; stage < stages; ++stage) {
        barrier_init(full(ring, stage), producers);
        barrier_init(empty(ring, stage), consumers);
      }
    }
  }
};

enum class Side { consumer, producer };

// Where one side stands in ring `number`. `ahead`: of the stage that many behind the next one, fewer than there are.
template <int stages, int rings = 1>
struct Ring {
  const RingBarriers<stages, rings>& barriers;
  int number;
  int stage = 0;  // the next one
  u32 phase;      // of it: a consumer waits for the end of phase 0 of "full" first, a producer finds all stages empty

  __device__ __forceinline__ Ring(const RingBarriers<stages, rings>& barriers, Side side, int number = 0)
      : barriers(barriers), number(number), phase(side == Side::producer) {}

  __device__ __forceinline__ u32 full() const { return barriers.full(number, stage); }
  __device__ __forceinline__ u32 empty() const { return barriers.empty(number, stage); }
  __device__ __forceinline__ void wait_until_full() const { barrier_wait(full(), phase); }
  __device__ __forceinline__ void wait_until_empty() const { barrier_wait(empty(), phase); }
  __device__ __forceinline__ void next() {
    phase ^= stage == stages - 1;
    stage = stage == stages - 1 ? 0 : stage + 1;
  }

  __device__ __forceinline__ int stage_at(int ahead) const {
    return stage + ahead >= stages ? stage + ahead - stages : stage + ahead;
  }
  __device__ __forceinline__ u32 empty(int ahead) const { return barriers.empty(number, stage_at(ahead)); }
  __device__ __forceinline__ void wait_until_full(int ahead) const {
    barrier_wait(barriers.full(number, stage_at(ahead)), phase ^ (stage + ahead >= stages));
  }
  __device__ __forceinline__ void next(int steps) {
    const int next = stage + steps;
    phase ^= next >= stages;
    stage = next >= stages ? next - stages : next;
  }
};

}  // namespace hypermla::cute
