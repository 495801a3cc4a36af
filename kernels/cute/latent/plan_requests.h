// The work list of the latent kernel, made on the device from lengths that the host does not know.
#pragma once

namespace hypermla::cute {

inline constexpr int kMaxPlannedRequests = 2048;

struct PlanRequestsProblem {
  int split = 0;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("split", self.split, "token blocks after which every request is cut, whatever its batch; 0: free");
  }
};

struct PlanRequestsTiling {
  int threads = 256;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("threads", self.threads, "threads of the one block");
  }
};

// What the host fixes before the lengths are known, so that a captured graph serves any lengths. Workers (thread
// blocks) form `groups` of `side` workers that attend `side` row tiles of a request side by side; more row tiles than
// that are taken in `passes`.
struct RequestSchedule {
  int side = 1;
  int passes = 1;
  int groups = 1;

  int workers() const { return side * groups; }
};

// The schedule for `row_tiles` tiles on `workers` workers that leaves the fewest of them idle; tiles that walk side by
// side share the tokens' reads, so few passes are better.
inline RequestSchedule schedule_requests(int row_tiles, int workers) {
  RequestSchedule best;
  double best_use = 0;
  for (int passes = 1; passes <= row_tiles; ++passes) {
    const int side = (row_tiles + passes - 1) / passes;
    if (side > workers) continue;
    if (passes > 1 && side < 8 && best_use > 0) break;
    const RequestSchedule one{side, passes, workers / side};
    const double use = double(row_tiles) / (double(side) * passes) * one.workers() / workers;
    if (use > best_use + 0.04) {
      best = one;
      best_use = use;
    }
  }
  return best;
}

}  // namespace hypermla::cute
