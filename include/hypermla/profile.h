// What Kernel::profile() of hypermla.h returns: plain values, all of which are in the run's profile.json, too.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace hypermla {

// The time of a piece of work, from several repetitions, and what follows from it.
struct Times {
  double median_us = 0, low_us = 0, high_us = 0;  // low to high: the 5th to the 95th percentile
  int repetitions = 0;
  std::optional<double> sm_mhz, watts;  // means over the measurement, where the board tells
  double tflops = 0, gbps = 0;          // the algorithm's work and bytes in the median
  double roofline_fraction = 0;         // predicted over measured time
};

// One figure, with what a table needs to print it.
struct Metric {
  std::string name;   // as the profilers call it: "dram__bytes_read.sum"
  std::string label;  // "DRAM read"
  std::string unit;   // of the value: "GB"; empty for a plain count
  double value = 0;
};

// What bounds a kernel, by the rules of conf/profile_rules.json.
struct Bottleneck {
  std::string kind;             // "memory-bound"
  std::string confidence = {};  // "high", "medium" or "low"
  std::string why = {};
  std::vector<std::string> evidence = {};  // "dram_pct = 93.2 >= 70"
  std::string stage = {};                  // whose bottleneck it is: the one that takes longest
};

// What to try next: a knowledge card that the profile fires.
struct Opportunity {
  std::string id;  // "O7", of the cards in docs/knowledge
  std::string name;
  double gain_percent = 0;  // of the time of all stages, at most
  std::string trigger;      // "xu_pct = 81 >= 70"
  std::string why;
  std::string card = {};     // "docs/knowledge/optimizations/fast-math-online-softmax.md"
  std::string refuted = {};  // the figure, and where it is logged, if the idea lost on this kernel; else empty
  std::string stage = {};    // that fires it, where there are several
};

struct ProfileSummary {
  std::string directory;                   // holds report.md, profile.json and the files of the mode
  std::string missing;                     // why the mode's own numbers are not there; empty when they are
  Times cold;                              // every run finds the cache flushed
  Times burst;                             // a few runs back to back after a rest
  std::optional<Times> sustained;          // on a board that was kept busy; modes annotation and event on GPUs
  std::optional<Bottleneck> bottleneck;    // absent where the rules were not found
  std::vector<Opportunity> opportunities;  // the three best, by their estimates; then all that were refuted

  struct Stage {
    std::string name;             // of a kernel, or of several that run at once
    std::optional<Times> burst;   // where there is more than one stage
    std::vector<Metric> metrics;  // counters of the hardware; empty where none were read
  };
  std::vector<Stage> stages;
};

}  // namespace hypermla
