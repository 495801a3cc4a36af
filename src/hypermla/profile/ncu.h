// Nsight Compute's command line (ncu), driven: it starts this program again and counts around the run that
// run_for_profilers() marks. Clocks are never changed.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "hypermla/profile/profilers.h"

namespace hypermla {

// "ncu 2025.3.1"; throws Error when there is no ncu.
std::string ncu_version(const std::string& program);

// The counters of the catalogue of every kernel, in launch order. Throws Error with ncu's own words when it fails.
std::vector<std::map<std::string, double>> ncu_counters(const ProfileRequest& request);

// The page `raw` as CSV: a row of names, a row of units, then one row per launch. One map per kernel of `kernels`,
// which were launched in that order; launches of others are skipped. Pure.
std::vector<std::map<std::string, double>> parse_ncu_raw(const std::string& csv,
                                                         const std::vector<std::string>& kernels);

// NVIDIA's own advice in the page `details` as CSV, the largest estimate first. Pure.
struct NcuAdvice {
  std::string rule;
  std::string kind;  // OPT, WRN or INF
  std::string text;
  std::optional<double> gain_percent;
};
std::vector<NcuAdvice> parse_ncu_advice(const std::string& csv);

// One source file as sampled: the page `source` as CSV with `--print-source cuda,sass`. Pure.
struct SourceSamples {
  std::string path;  // as the compiler recorded it
  struct Line {
    int number = 0;
    double samples = 0, instructions = 0;
    std::string stall;  // the most frequent reason, such as "long_sb"; empty where there are no samples
  };
  std::vector<Line> lines;  // those that instructions come from
};
std::vector<SourceSamples> parse_ncu_source(const std::string& csv);
double total_samples(const std::vector<SourceSamples>& files);

// The source with the share of `total`, the samples of all files of the kernel, the main reason to wait and a mark (>>)
// on every line with 5 % or more. Pure.
std::string annotate_source(const std::string& source, const SourceSamples& samples, const std::string& kernel,
                            double total);

}  // namespace hypermla
