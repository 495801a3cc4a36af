// A profile: what one run measured, what that says, and as profile.json, which reports and comparisons are made from.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "hypermla/base/fields.h"
#include "hypermla/profile.h"
#include "hypermla/roofline/roofline.h"

namespace hypermla {

// What stands out in a stage, beside what bounds it.
struct Issue {
  std::string name, trigger, why;
};

// One kernel; or a group of kernels that run at once, which comes behind all kernels.
struct ProfileStage {
  std::string name;
  std::vector<std::string> members;  // of a group: its kernels
  std::vector<int> partition;        // of a group: the SMs of each member, where they have their own
  Json tiling = Json::object();
  std::map<std::string, int> rejected;           // why tilings do not work here, and how many for that
  std::array<std::int64_t, 3> grid = {1, 1, 1};  // of a group: all blocks of its members
  std::string artifact;                          // the directory in the cache; empty for a group
  std::string compiler;
  std::optional<int> registers, frame_bytes, shared_bytes;  // of a thread, a thread and a block
  double flops = 0, bytes = 0, predicted_us = 0;
  std::string bound;
  std::string group;                      // that the kernel belongs to; empty: none
  std::optional<int> processors;          // the SMs of its own that a member of a group has
  std::optional<Times> burst;             // alone; absent where it is the only stage
  std::map<std::string, double> metrics;  // counters by their own names; empty where none were read
  std::string metrics_source;             // "CUPTI 13.0.1"
  std::map<std::string, double> signals;  // see signals.h
  std::optional<Bottleneck> bottleneck;
  std::vector<Issue> issues;
};

// Figures of a timeline; timeline.h says how they are made.
struct TimelineFigures {
  struct Kernel {
    std::string name;
    int runs = 0;
    double sum_us = 0, mean_us = 0;
    // Of the samples that lie within it: means in percent of the peak, and the share of time in which neither was used.
    std::optional<double> tensor_pct, dram_pct, bubble_pct;
  };
  struct Samples {
    int count = 0;
    double interval_us = 0;
  };
  struct Overlap {
    std::string a, b;
    double us = 0, share = 0;  // in which both ran; of the shorter one
  };
  struct Gap {
    double us = 0;
    std::string after, before;
  };
  struct Step {
    std::string name;
    double us = 0, waited_us = 0;
  };
  int operations = 0, streams = 0;
  double span_us = 0, busy_us = 0, sum_us = 0, idle_us = 0;  // busy: anything ran; sum: of all operations
  double concurrency = 0;                                    // sum over busy: 1 when nothing overlaps
  std::vector<Kernel> kernels;
  std::optional<Samples> samples;
  std::string no_samples;           // why there are none
  std::vector<Overlap> overlaps;    // for every pair of kernel names
  std::vector<Gap> gaps;            // in which nothing ran, longest first
  std::vector<Step> critical_path;  // the chain that ends last: before each the one that ended last before it started
};

struct Profile {
  static constexpr int kSchema = 2;

  struct ProfiledDevice {
    std::string name, arch;
    int processors = 0;
    std::string driver;
  };
  struct Clocks {
    std::optional<int> sm_mhz, memory_mhz;  // what they are locked at; absent: the default
    bool locked = false;
  };
  struct Roofline {
    double peak_tflops = 0, peak_gbps = 0, ridge = 0, predicted_us = 0;
    std::string bound;
    // Measured on this device by `hypermla device --measure`.
    std::optional<double> matmul_burst_tflops, matmul_sustained_tflops, read_gbps, copy_gbps;
  };
  struct Timing {
    Times cold, burst;
    std::optional<Times> sustained;
    // Calls `each(name, times)` for those that were measured.
    template <class Each>
    void for_each(Each each) const {
      each("cold", cold);
      each("burst", burst);
      if (sustained) each("sustained", *sustained);
    }
  };
  struct Counters {
    std::optional<std::string> chip = {};  // "GH100"
    std::optional<int> passes = {};
    std::vector<std::string> unknown = {};                   // counters that the chip lacks
    std::map<std::string, std::string> missing_groups = {};  // why a group has no counters as a whole
    std::string source = "none";
    std::vector<std::string> attempts = {};  // how engines failed
  };

  // What --check found before the measurement.
  struct Check {
    bool passed = false;
    std::map<std::string, double> relative_errors;  // of the outputs
  };

  int schema = kSchema;
  std::string mode, date, kernel, version, label;
  Json problem = Json::object();
  ProfiledDevice device;
  std::optional<Clocks> clocks;       // of a GPU
  std::optional<std::uint64_t> seed;  // of random inputs; absent: the inputs were the caller's
  std::optional<Check> check;
  Roofline roofline;
  Cost cost;
  Timing timing;
  std::vector<ProfileStage> stages;
  std::optional<double> host_us_per_run;
  std::string missing;  // why the mode's own numbers are not there; empty when they are
  std::optional<Counters> counters;
  std::optional<TimelineFigures> timeline;
  std::string ncu_report;                      // Nsight Compute's advice, Markdown
  std::map<std::string, std::uint64_t> files;  // the others of the run, with their bytes
  std::optional<Bottleneck> bottleneck;
  std::vector<Opportunity> opportunities;
};

// Whether a run can have taken that: no time is 0, negative or infinite, and the median lies in the interval.
inline bool is_possible(const Times& times) {
  return times.repetitions >= 1 && times.low_us > 0 && times.low_us <= times.median_us &&
         times.median_us <= times.high_us && std::isfinite(times.high_us);
}
// "9.5 us (9.1 to 9.9 us, 20 repetitions)"
std::string to_text(const Times& times);

Json to_json(const Profile& profile);
// Throws Error naming what is missing or of another type.
Profile profile_from_json(const Json& json);
// The profile.json of a run: its directory or the file itself. Throws Error naming the file.
Profile load_profile(const std::filesystem::path& path);

// The report, as Markdown.
std::string render_report(const Profile& profile);
std::string render_timeline(const TimelineFigures& figures);

}  // namespace hypermla
