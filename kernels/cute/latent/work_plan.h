// Cuts the work of the latent kernel evenly over the multiprocessors; host side.
//
// Thread blocks that read the same tokens at the same time share them through L2, so the row tiles of a request walk
// its tokens side by side: the thread blocks form `groups` of row_tiles blocks each, and the requests' token blocks,
// laid end to end, are cut into one range per group. More row tiles than multiprocessors are taken one after the other
// ("waves"), the last, incomplete wave cut over all multiprocessors. Among these plans the cheapest by a small cost
// model wins: a cut request costs partial outputs and their merge, so few cuts may beat an even cut.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "work.h"

namespace hypermla::cute {

// Costs in units of one 64 x 64 block (about 1.4 us at 1.75 GHz), fitted on an H200.
struct WorkCosts {
  double item = 2.0;      // fill and drain of the pipeline, queries, output
  double combine = 2.5;   // the merge at the end
  double partial = 0.03;  // a partial output, written and read, all multiprocessors together

  int overhead() const {
    return std::max(1, static_cast<int>(item));
  }  // whole blocks that an item costs on top of its own
};

// What it costs to read the tokens of a request at several places at a time, and to keep more multiprocessors busy
// under the power cap: b32 s16 took 763 (869 sustained) instead of 752 us (843), where the count promised 3 % less.
inline constexpr double kScattered = 1.02;

struct WorkPlan {
  int grid = 0;                 // thread blocks
  int rounds = 0;               // items per thread block, the closing one included
  std::vector<WorkItem> items;  // [grid][rounds]
  int slots = 0;
  double cost = 0;  // in blocks of 64 x 64
};

// lengths: tokens of every request (0 allowed); row_tiles = ceil(h * s / 64); workers: how many thread blocks run at a
// time. split: 0, or the token blocks after which every request is cut, independent of the batch, so that its
// output does not depend on its batch mates. rows, queries: of every request, for the items. joins: the kernel takes up
// the other one of two parts.
inline WorkPlan plan_work(const std::vector<int>& lengths, int row_tiles, int workers, int split = 0,
                          WorkCosts costs = {}, int rows = 0, int queries = 0, bool joins = false) {
  const int requests = static_cast<int>(lengths.size());
  // A request without tokens still has outputs to write: one block, all masked.
  std::vector<int> blocks(requests);
  long long total = 0;
  for (int r = 0; r < requests; ++r) total += blocks[r] = std::max(1, (lengths[r] + 63) / 64);

  struct Range {
    int request, begin, end;
  };
  using Ranges = std::vector<std::vector<Range>>;
  // Ranges of token blocks for `parts` bins of at most `load` blocks each, an item counting costs.item more; empty if
  // they do not fit. A bin leaves no stub shorter than an item's overhead.
  const int overhead = costs.overhead();
  auto fill = [&](const std::vector<int>& of, int parts, long long load) {
    Ranges bins(parts);
    int bin = 0;
    long long room = load;
    for (int r = 0; r < static_cast<int>(of.size()); ++r) {
      int begin = 0;
      while (begin < of[r]) {
        if (room <= overhead) {
          if (++bin == parts) return Ranges{};
          room = load;
          continue;
        }
        const int take = static_cast<int>(std::min<long long>(of[r] - begin, room - overhead));
        bins[bin].push_back({r, begin, begin + take});
        begin += take;
        room -= take + overhead;
      }
    }
    return bins;
  };
  auto balance = [&](const std::vector<int>& of, int parts) {
    long long sum = 0;
    for (int n : of) sum += n;
    long long low = overhead + 1, high = sum + overhead * static_cast<long long>(of.size() + 1) + 1;
    while (low < high) {
      const long long middle = (low + high) / 2;
      if (fill(of, parts, middle).empty())
        low = middle + 1;
      else
        high = middle;
    }
    return fill(of, parts, low);
  };

  // One tile's items, thread block by thread block.
  struct Placed {
    int worker, request, row_tile, begin, end;
  };
  auto finish = [&](const std::vector<Placed>& placed, int grid) {
    WorkPlan plan;
    plan.grid = grid;
    std::vector<std::vector<WorkItem>> of(grid);
    std::vector<double> load(grid, 0.0);
    std::vector<std::vector<std::pair<int, int>>> parts(static_cast<size_t>(requests) * row_tiles);
    for (const Placed& p : placed) {
      parts[static_cast<size_t>(p.request) * row_tiles + p.row_tile].push_back(
          {p.worker, static_cast<int>(of[p.worker].size())});
      of[p.worker].push_back(
          {p.request, p.row_tile, p.begin, p.end, lengths[p.request], -1, p.request * rows, queries, 0, 1, {}, {}});
      load[p.worker] += p.end - p.begin + costs.item;
    }
    for (const auto& list : parts) {
      if (list.size() < 2) continue;
      for (int part = 0; part < static_cast<int>(list.size()); ++part) {
        WorkItem& item = of[list[part].first][list[part].second];
        item.slot = plan.slots++;
        item.part = part;
        item.parts = static_cast<int>(list.size());
        if (joins && split == 0 && list.size() == 2 && list[0].first > list[1].first &&
            list[1].second + 1 < static_cast<int>(of[list[1].first].size()))
          item.join = part == 0 ? kTakesUp : kGives;
      }
    }
    size_t most = 0;
    for (const auto& list : of) most = std::max(most, list.size());
    plan.rounds = static_cast<int>(most) + 1;
    plan.items.assign(static_cast<size_t>(plan.rounds) * grid, WorkItem{});
    for (int w = 0; w < grid; ++w) {
      std::copy(of[w].begin(), of[w].end(), plan.items.begin() + static_cast<size_t>(w) * plan.rounds);
    }
    plan.cost = *std::max_element(load.begin(), load.end());
    if (plan.slots > 0) plan.cost += costs.combine + costs.partial * plan.slots;
    return plan;
  };

  WorkPlan best;
  best.cost = 1e30;
  auto consider = [&](WorkPlan plan) {
    if (plan.cost < best.cost) best = std::move(plan);
  };
  if (split > 0) {
    std::vector<long long> load(workers, 0);
    std::vector<Placed> placed;
    for (int r = 0; r < requests; ++r) {
      for (int begin = 0; begin < blocks[r]; begin += split) {
        for (int m = 0; m < row_tiles; ++m) {
          const int end = std::min(begin + split, blocks[r]);
          const int worker = static_cast<int>(std::min_element(load.begin(), load.end()) - load.begin());
          load[worker] += end - begin + overhead;
          placed.push_back({worker, r, m, begin, end});
        }
      }
    }
    return finish(placed, workers);
  }
  for (int groups = 1; groups * row_tiles <= workers && groups <= total; ++groups) {
    const Ranges ranges = balance(blocks, groups);
    std::vector<Placed> placed;
    for (int g = 0; g < groups; ++g) {
      const int first = (groups - 1 - g) * row_tiles;  // who takes up a part stands behind who gives it
      for (const Range& range : ranges[g]) {
        for (int m = 0; m < row_tiles; ++m) placed.push_back({first + m, range.request, m, range.begin, range.end});
      }
    }
    consider(finish(placed, groups * row_tiles));
  }
  const long long tiles = static_cast<long long>(requests) * row_tiles;
  // Only where the tiles of a request are many: this order reads the tokens of a cut tile at several places at a time.
  if (tiles >= workers && (row_tiles >= 16 || row_tiles > workers)) {
    for (const bool cut_rest : {false, true}) {
      std::vector<Placed> placed;
      const long long whole = tiles - tiles % workers;
      for (long long i = 0; i < (cut_rest ? whole : tiles); ++i) {
        const int r = static_cast<int>(i / row_tiles);
        placed.push_back({static_cast<int>(i % workers), r, static_cast<int>(i % row_tiles), 0, blocks[r]});
      }
      if (cut_rest) {
        std::vector<int> rest;
        for (long long i = whole; i < tiles; ++i) rest.push_back(blocks[i / row_tiles]);
        if (rest.empty()) continue;
        const Ranges ranges = balance(rest, workers);
        for (int w = 0; w < workers; ++w) {
          for (const Range& range : ranges[w]) {
            const long long i = whole + range.request;
            placed.push_back({workers - 1 - w, static_cast<int>(i / row_tiles), static_cast<int>(i % row_tiles),
                              range.begin, range.end});
          }
        }
      }
      WorkPlan plan = finish(placed, workers);
      plan.cost *= kScattered;
      consider(std::move(plan));
    }
  }
  return best;
}

}  // namespace hypermla::cute
