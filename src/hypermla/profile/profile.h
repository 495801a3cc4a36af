// Profiles of an executable: measured, set against the roofline, and written as files.
//
//   out/profiles/<mode>/<kernel>/<problem>/<time>/
//     report.md       rendered from profile.json
//     profile.json    everything, with a schema version
//     params.json     the problem
//     tiling/         <stage>.json, and <stage>/autotuning.json where the tuner measured
//     compiled/       <stage>/: source, Tile IR, cubin or library, report.json with registers and spills
#pragma once

#include <filesystem>
#include <string>

#include "hypermla/plan/plan.h"
#include "hypermla/plan/registry.h"
#include "hypermla/tune/autotune.h"

namespace hypermla {

enum class ProfileMode { annotation, event, ncu, nsys, disabled };
ProfileMode profile_mode_from_name(const std::string& name);  // throws Error listing the modes
std::string profile_mode_name(ProfileMode mode);

struct ProfileRequest {
  const KernelEntry& kernel;
  KernelPlan& plan;
  Executable& executable;        // prepared
  Device& device;
  const DeviceSpec& spec;        // its roofline
  const AutotuneResult& tuning;  // no stages when the tuner did not run
  std::filesystem::path out_dir;  // receives the files; empty: out/profiles/... below the working directory
  int bench_runs = 20;            // repetitions of a measurement
  double sustained_seconds = 1;   // GPUs only: how long the board is kept busy before the sustained figure
};

class ProfileResult {
 public:
  ProfileResult(Json profile, std::filesystem::path directory)
      : profile_(std::move(profile)), directory_(std::move(directory)) {}
  const Json& json() const { return profile_; }
  const std::filesystem::path& directory() const { return directory_; }
  // Median of the whole executable: cold, as a first look at fresh data would find it.
  double total_time_us() const { return profile_.at("timing").at("cold").at("median_us"); }

 private:
  Json profile_;
  std::filesystem::path directory_;
};

// Times by events around graph replays: cold (cache flushed), burst (back to back after a rest) and, on a GPU, sustained
// (after the clocks settled under the power cap). For a pipeline, every stage alone as well.
ProfileResult event_profile(const ProfileRequest& request);

// The report of a profile.json, as Markdown. Pure.
std::string render_report(const Json& profile);

}  // namespace hypermla
