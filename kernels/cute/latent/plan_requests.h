// The work list of the latent kernel, made on the device from lengths that the host does not know.
#pragma once

namespace hypermla::cute {

inline constexpr int kMaxPlannedRequests = 2048;
inline constexpr int kMaxGroups = 160;  // of workers

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
    const RequestSchedule one{side, passes, workers / side < kMaxGroups ? workers / side : kMaxGroups};
    const double use = double(row_tiles) / (double(side) * passes) * one.workers() / workers;
    if (use > best_use + 0.04) {
      best = one;
      best_use = use;
    }
  }
  return best;
}

// How much room the lists take, whatever the lengths.
struct RequestListSizes {
  long long rounds = 0;          // items of a worker, the closing one included
  long long combines = 0;        // merges
  long long slots_per_tile = 0;  // partial outputs of a row tile side
};

// For `b` requests of at most `blocks` token blocks. split: PlanRequestsProblem's. An item costs `overhead` blocks on
// top of its own, a merge merge_cost, and each of its parts part_cost.
inline RequestListSizes request_list_sizes(const RequestSchedule& on, long long b, long long blocks, int split,
                                           int overhead, double merge_cost, double part_cost) {
  const auto divided_up = [](long long value, long long divisor) { return (value + divisor - 1) / divisor; };
  const auto least_of = [](long long one, long long other) { return one < other ? one : other; };
  const long long requests = b * on.passes, parts = split ? divided_up(blocks, split) : 1;
  // The planner gives a group an equal share, and more only where that is cheaper than to cut.
  const long long share = divided_up(requests * (blocks + overhead), on.groups);
  const long long load = share + overhead + static_cast<long long>(merge_cost + part_cost * 2 * on.workers()) + 1;
  const long long shortest = split ? least_of(split, overhead + 1) : overhead + 1;
  return {.rounds = least_of(requests * parts, load / shortest + 3) + 2,
          .combines = (split ? requests : least_of(on.groups, requests)) * on.side,
          .slots_per_tile = !split ? 2 * on.groups : parts > 1 ? requests * parts : 1};
}

}  // namespace hypermla::cute
