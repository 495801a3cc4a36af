// Profiles an executable: measured, set against the roofline, judged, and written as files.
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
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hypermla/plan/plan.h"
#include "hypermla/plan/registry.h"
#include "hypermla/profile/profile.h"
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
  std::filesystem::path cards;               // docs/knowledge; empty: no advice
  std::vector<std::filesystem::path> cupti;  // places of libcupti.so.13, the best first
  std::string ncu;                           // Nsight Compute's program
  std::string nsys;                          // Nsight Systems' program
  // The program `hypermla`, which tools that watch a whole process start: it runs the same kernel once.
  std::filesystem::path program;
  std::vector<std::filesystem::path> kernel_roots;  // the kernels' sources, for annotated copies of them
  std::filesystem::path clock_lock;                 // what scripts/lock-gpu-clock.sh leaves while clocks are locked
};

// `toolkits`: roots of CUDA installations or of the wheels' tree, the best first. `path`: the directories in which
// programs are looked for before the usual places, separated by colons. Looks at files only, starts nothing.
ProfileTools find_profile_tools(const std::vector<std::filesystem::path>& toolkits, const std::string& path);

// Throws Error where what a profile is explained by cannot be read: before anything is measured.
void require_knowledge(const ProfileTools& tools);

struct ProfileRequest {
  const KernelEntry& kernel;
  KernelPlan& plan;
  Executable& executable;  // prepared
  Device& device;
  const DeviceSpec& spec;              // its roofline
  const AutotuneResult& tuning;        // no stages when the tuner did not run
  std::filesystem::path out_dir = {};  // new or empty; "": out/profiles/... below the working directory
  int bench_runs = 20;                 // repetitions of a measurement
  double sustained_seconds = 1;  // annotation and event on GPUs: how long the board is busy before the sustained time
  std::string label = {};        // the user's own word for this run, kept in profile.json
  std::string device_name = "auto";          // for tools that watch a second process: its device, as in make_device()
  std::uint64_t seed = 0;                    // of the inputs, where they are random; 0: they are the caller's
  std::optional<Profile::Check> check = {};  // where the outputs were compared
  ProfileTools tools = {};
};

struct ProfileResult {
  Profile profile;
  std::filesystem::path directory;
};

// Throws Error unless a profile can go to `out_dir` (empty: to out/profiles): this process can write it, and it is new
// or empty, so that the files of two runs are never mixed. profile() asks, too; ask before work that takes long.
void require_out_dir(const std::filesystem::path& out_dir);

// Measures in that mode and writes the files. A profiler that fails leaves a report that says so: see Profile::missing.
// Throws Error for a mode that the device or the installation cannot do at all, and for ProfileMode::disabled.
ProfileResult profile(const ProfileRequest& request, ProfileMode mode);

// Throws Error naming `what` where a text is no UTF-8, which profile.json could not hold.
void require_utf8(std::string_view what, const std::string& text);

// The command line that runs the request's kernel once, marked by run_for_profilers(): same problem, same tilings,
// random inputs.
std::vector<std::string> relaunch_command(const ProfileRequest& request);

// One run, marked as the one to be looked at for a profiler that watches this process.
void run_for_profilers(Executable& executable, Device& device);

}  // namespace hypermla
