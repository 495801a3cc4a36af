// How long a kernel really takes on a device, for the choice among kernels (plan/choice.h). Not the least possible time
// (roofline.h): it counts what a kernel reaches of the measured ceilings.
//
//   time = max(memory, tensor + a memory') + launches
//
// `tensor` and `memory` are the kernel's own times of arithmetic, rows padded to whole tiles, and of traffic; memory'
// is the traffic at the full read rate, and a the power_share of devices.json: under the power cap tensor work and
// reads share one budget, x + a y <= 1. docs/choice.md compares predictions with measurements.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "hypermla/roofline/roofline.h"

namespace hypermla {

// After idle, or for seconds under the power cap.
enum class Load { burst, sustained };

// What the kernels of a path reach on a device, as parts of what their figures say: "reach" of devices.json.
struct Reach {
  double tensor = 1, memory = 1;
  double overlap = 1;  // of two paths at once
};

// The ceilings of a device: the measured figures of devices.json, or where there are none the specified ones.
struct Ceilings {
  double flops = 0;        // FLOP/s
  double bytes = 0;        // bytes/s
  double power_share = 0;  // 0 if not measured: arithmetic and traffic then overlap perfectly
  double launch = 0;       // seconds of one more kernel
  int processors = 1;
  // Its tensor cores multiply 64 rows or more at a time (Hopper, Blackwell of data centres).
  bool tall_tiles = false;
  Load load = Load::sustained;
  Reach latent = {}, decompressed = {}, hybrid = {};  // by path
};
// Throws Error where neither figure is known.
Ceilings ceilings_of(const DeviceSpec& device, DType dtype, Load load);

// a in tensor + a reads = both, which is how a device under its power cap divides its time: from the seconds of one
// kernel that does both, of its tensor work alone, and of its reads at the full rate. Clamped to 0.01 to 1, since
// measurements are noisy.
double power_share_of(double both, double tensor, double reads);

enum class Limit { tensor, memory, power, launches };
std::string_view limit_name(Limit limit);

struct TimeEstimate {
  double seconds = 0;
  Limit limit = Limit::memory;  // what takes most of the time; power: both, under the power cap
};

// What a kernel reaches with one size of tile, as parts of the ceilings of a device. It stands in the kernel's .cpp,
// with the record it comes from. They are from H200s with 790 TFLOP/s (725 sustained) and 4580 GB/s, those of flash_mla
// v3 nearly all from an H100; other devices reach these parts times the Reach of the path.
struct Figures {
  int rows = 1;                     // of a tile: rows are padded to whole tiles
  double burst = 1, sustained = 1;  // tensor work on padded rows, of matmul_{burst,sustained}_tflops
  double memory = 1;                // of read_GBps
  // Of tiles with few rows: the part of tensor work where tensor cores do not ask for 64 rows at a time. 0: the same.
  double elsewhere = 0;
  // The part of the processors that must read to reach `memory`, where a block owns its tile; 0: work is cut over all
  // processors.
  double readers = 0;
  int tiles_of_block = 1;  // that a block works on at a time, where it owns them
  // What start, merges and end cost, in launches: where tiles fill all processors, half of them, or fewer.
  struct {
    double full = 1, half = 1, few = 1;
  } launches = {};
};

// What a kernel does with tiles of some size, padded rows included.
struct TiledWork {
  Cost cost;
  double tiles = 1;
};

// The times of one kernel's work before they are set against each other. Those of kernels that run at once add up.
struct WorkTimes {
  double tensor = 0;   // seconds
  double memory = 0;   // at the kernel's own rate
  double traffic = 0;  // at the full rate
  double launches = 0;

  WorkTimes& operator+=(const WorkTimes& other);
};
WorkTimes times_of(const Figures& figures, const TiledWork& work, const Ceilings& ceilings, const Reach& reach = {});
// The times with the fastest of several sizes of tile; among equally fast ones, which memory bounds, that with the
// least tensor work, since it leaves most to other kernels. Throws Error where there are none.
WorkTimes best_times(const std::vector<Figures>& figures, const std::function<TiledWork(int rows)>& work,
                     const Ceilings& ceilings, const Reach& reach = {});

// The formula above, its work divided by `overlap`, which is below 1 for kernels that slow each other down.
TimeEstimate estimate(const WorkTimes& times, const Ceilings& ceilings, double overlap = 1);
TimeEstimate in_turn(const TimeEstimate& first, const TimeEstimate& second);

}  // namespace hypermla
