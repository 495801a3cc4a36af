// Profiles of an executable: measured, set against the roofline, judged, and written as files.
//
//   out/profiles/<mode>/<kernel>/<problem>/<time>/
//     report.md       rendered from profile.json
//     profile.json    everything, with a schema version
//     params.json     the problem
//     tiling/         <stage>.json, and <stage>/autotuning.json where the tuner measured
//     compiled/       <stage>/: source, Tile IR, cubin or library, report.json with registers and spills
// and the files of the mode; docs/profiling.md lists them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "hypermla/plan/plan.h"
#include "hypermla/plan/registry.h"
#include "hypermla/tune/autotune.h"

namespace hypermla {

// annotation   hardware counters of every stage and the roofline; the first look
// event        times only: cold, burst, sustained
// ncu          Nsight Compute: every section, source lines, NVIDIA's own advice
// nsys         the timeline: streams, overlap, gaps
// disabled     nothing is measured
enum class ProfileMode { annotation, event, ncu, nsys, disabled };
ProfileMode profile_mode_from_name(const std::string& name);  // throws Error listing the modes
std::string profile_mode_name(ProfileMode mode);

// What profiles need beyond the kernel. Each may be absent; a mode that cannot do without says so.
struct ProfileTools {
  std::filesystem::path rules;               // conf/profile_rules.json; empty: no classification
  std::vector<std::filesystem::path> cupti;  // places of libcupti.so.13, the best first
  std::string ncu;                           // Nsight Compute's program
  std::string nsys;                          // Nsight Systems' program
  // A command that prepares the same executable and calls run_for_profilers() once, for tools that watch a whole
  // process.
  std::vector<std::string> relaunch;
  std::filesystem::path program;      // hypermla itself, for profile() of a plan to make `relaunch` from
  std::filesystem::path kernel_root;  // the kernels' sources, for annotated copies of them
  std::filesystem::path clock_lock;   // what scripts/lock-gpu-clock.sh leaves while clocks are locked
};

struct ProfileRequest {
  const KernelEntry& kernel;
  KernelPlan& plan;
  Executable& executable;  // prepared
  Device& device;
  const DeviceSpec& spec;              // its roofline
  const AutotuneResult& tuning;        // no stages when the tuner did not run
  std::filesystem::path out_dir = {};  // receives the files; empty: out/profiles/... below the working directory
  int bench_runs = 20;                 // repetitions of a measurement
  double sustained_seconds =
      1;                   // annotation and event on GPUs: how long the board is kept busy before the sustained figure
  std::string label = {};  // the user's own word for this run, kept in profile.json
  ProfileTools tools = {};
};

class ProfileResult {
 public:
  ProfileResult(Json profile, std::filesystem::path directory)
      : profile_(std::move(profile)), directory_(std::move(directory)) {}
  const Json& json() const { return profile_; }
  const std::filesystem::path& directory() const { return directory_; }
  // Median of the whole executable: cold, as a first look at fresh data would find it.
  double total_time_us() const { return profile_.at("timing").at("cold").at("median_us"); }
  // False when the mode's own numbers could not be had (a profiler failed or was denied); missing() says why.
  bool complete() const { return missing().empty(); }
  std::string missing() const { return profile_.value("missing", ""); }
  const Json& stages() const { return profile_.at("stages"); }
  // Of one stage, by the counters' own names; an empty object where there are no counters.
  Json metrics(std::size_t stage) const { return stages().at(stage).value("metrics", Json::object()); }

 private:
  Json profile_;
  std::filesystem::path directory_;
};

// Measures in that mode and writes the files. A profiler that fails leaves a report that says so: see complete().
// Throws Error for a mode that the device or the installation cannot do at all, and for ProfileMode::disabled.
ProfileResult profile(const ProfileRequest& request, ProfileMode mode);

// The same in one call, for whoever has a plan and no executable yet: random inputs, tiling, measurement.
struct ProfileContext {
  std::shared_ptr<Device> device;
  const DeviceSpec& spec;
  Compiler& compiler;
  std::filesystem::path history_root = {};  // what the tuner remembers; empty: the plan's own tiling, untuned
  ProfileTools tools = {};                  // without `relaunch`, `program` is started with the plan's fields as flags
};
struct ProfileOptions {
  std::filesystem::path out_dir = {};  // empty: out/profiles/... below the working directory
  std::string version = {};            // of the plan's kernel, to be profiled on the plan's problem instead of the plan
  std::string label = {};
  int bench_runs = 20;
};
// Throws Error as profile() above does, and for a plan that no registered version made.
ProfileResult profile(const ProfileContext& context, KernelPlan& plan, ProfileMode mode,
                      const ProfileOptions& options = {});

// One run, marked as the one to be looked at for a profiler that watches this process.
void run_for_profilers(Executable& executable, Device& device);

// The report of a profile.json, as Markdown. Pure.
std::string render_report(const Json& profile);

}  // namespace hypermla
