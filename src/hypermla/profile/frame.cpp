#include "hypermla/profile/frame.h"

#include <algorithm>
#include <cmath>

#include "hypermla/base/date.h"
#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/json_file.h"
#include "hypermla/profile/rules.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

// Profiles of one second must not share a directory.
fs::path fresh_directory(const fs::path& wanted) {
  fs::path directory = wanted;
  for (int i = 2; fs::exists(directory); ++i) directory = wanted.string() + "-" + std::to_string(i);
  return directory;
}

template <class T>
std::optional<T> optional_at(const Json& json, const char* key) {
  return json.contains(key) && json[key].is_number() ? std::optional<T>(json[key].get<T>()) : std::nullopt;
}

ProfileStage describe(Executable& stage, const DeviceSpec& spec, DType dtype) {
  const Prediction prediction = stage.predict(spec, dtype);
  ProfileStage described;
  described.name = stage.name();
  described.flops = stage.cost().flops;
  described.bytes = stage.cost().bytes;
  described.predicted_us = prediction.seconds * 1e6;
  described.bound = bound_name(prediction.bound);
  return described;
}

ProfileStage describe_kernel(TiledKernel& kernel, const DeviceSpec& spec, DType dtype) {
  const Grid grid = kernel.grid();
  const Json& report = kernel.entry().report;
  ProfileStage stage = describe(kernel, spec, dtype);
  stage.tiling = kernel.tiling();
  stage.grid = {grid.x, grid.y, grid.z};
  stage.artifact = kernel.entry().dir.filename().string();  // name, target and hash of source and tiling
  stage.compiler = report.value("compiler", "");
  stage.registers = optional_at<int>(report, "registers");
  stage.frame_bytes = optional_at<int>(report, "frame_bytes");
  stage.shared_bytes = optional_at<int>(report, "shared_bytes");
  return stage;
}

// Members that run at once are one stage more: measured together, judged in their place.
ProfileStage describe_group(ConcurrentKernels& group, std::vector<ProfileStage>& kernels, const DeviceSpec& spec,
                            DType dtype) {
  ProfileStage stage = describe(group, spec, dtype);
  stage.partition = group.partition();
  double blocks = 0;
  for (const TiledKernel* member : launched_kernels(group)) {
    stage.members.push_back(member->name());
    blocks += member->grid().blocks();
    for (ProfileStage& kernel : kernels) {
      if (kernel.name != member->name()) continue;
      kernel.group = group.name();
      if (member->processors()) kernel.processors = member->processors();
    }
  }
  stage.grid[0] = std::int64_t(blocks);
  return stage;
}

// A board does not tell whether its clocks are locked; the script that locks them leaves a note.
Profile::Clocks clocks(const fs::path& note_file) {
  std::error_code ignored;
  if (note_file.empty() || !fs::exists(note_file, ignored)) return {};
  const Json note = read_json(note_file);
  if (!note.is_object()) return {};
  return {optional_at<int>(note, "sm_MHz"), optional_at<int>(note, "memory_MHz"), true};
}

}  // namespace

Times times_of(const Timing& timing, const Cost& cost, double predicted_us) {
  const double seconds = timing.median();
  return {.median_us = seconds * 1e6,
          .low_us = timing.low() * 1e6,
          .high_us = timing.high() * 1e6,
          .repetitions = int(timing.seconds.size()),
          .sm_mhz = timing.sm_mhz,
          .watts = timing.watts,
          .tflops = cost.flops / seconds * 1e-12,
          .gbps = cost.bytes / seconds * 1e-9,
          .roofline_fraction = predicted_us * 1e-6 / seconds};
}

std::vector<Executable*> profiled_stages(Executable& executable) {
  std::vector<Executable*> stages;
  for (TiledKernel* kernel : launched_kernels(executable)) stages.push_back(kernel);
  for (ConcurrentKernels* group : launched_groups(executable)) stages.push_back(group);
  return stages;
}

void require_out_dir(const fs::path& out_dir) {
  sweep_scratch(out_dir);
  std::error_code no_directory;
  if (fs::directory_iterator(out_dir, no_directory) != fs::directory_iterator())
    fail("'{}' holds files already; a profile goes to a new or an empty directory, so that runs are never mixed",
         out_dir.string());
  require_writable(out_dir.empty() ? "out/profiles" : out_dir);
}

Frame::Frame(const ProfileRequest& asked, ProfileMode mode) : request(asked) {
  KernelPlan& plan = request.plan;
  Executable& executable = request.executable;
  const DeviceSpec& spec = request.spec;
  const DeviceInfo& info = request.device.info();
  const Prediction prediction = executable.predict(spec, plan.dtype());

  profile.mode = profile_mode_name(mode);
  profile.date = utc_now("%Y-%m-%dT%H:%M:%SZ");
  profile.kernel = request.kernel.full_name();
  profile.version = request.kernel.version;
  require_utf8("the label", request.label);
  profile.label = request.label;
  if (request.seed) profile.seed = request.seed;
  profile.check = request.check;
  profile.problem = to_json(plan.problem_fields());
  profile.device = {info.name, info.arch, info.processors, info.driver};
  if (request.device.is_gpu()) profile.clocks = clocks(request.tools.clock_lock);
  profile.cost = executable.cost();
  const double rate = profile.cost.product_rate();
  profile.roofline = {.peak_tflops = rate * spec.peak_tflops(plan.dtype()),
                      .peak_gbps = spec.peak_gbps,
                      .ridge = rate * ridge(spec, plan.dtype()),
                      .predicted_us = prediction.seconds * 1e6,
                      .bound = std::string(bound_name(prediction.bound)),
                      .matmul_burst_tflops = optional_at<double>(spec.measured, "matmul_burst_tflops"),
                      .matmul_sustained_tflops = optional_at<double>(spec.measured, "matmul_sustained_tflops"),
                      .read_gbps = optional_at<double>(spec.measured, "read_GBps"),
                      .copy_gbps = optional_at<double>(spec.measured, "copy_GBps")};
  for (TiledKernel* kernel : launched_kernels(executable))
    profile.stages.push_back(describe_kernel(*kernel, spec, plan.dtype()));
  for (ProfileStage& stage : profile.stages)
    for (const AutotuneResult::Stage& tuned : request.tuning.stages)
      if (tuned.kernel == stage.name) stage.rejected = tuned.rejected;
  for (ConcurrentKernels* group : launched_groups(executable))
    profile.stages.push_back(describe_group(*group, profile.stages, spec, plan.dtype()));

  require_out_dir(request.out_dir);
  require_knowledge(request.tools);  // what judge() needs, before there is a file
  wanted_ = request.out_dir.has_filename() ? request.out_dir : request.out_dir.parent_path();  // a slash at the end
  if (wanted_.empty())
    wanted_ = fresh_directory(fs::path("out/profiles") / profile.mode / profile.kernel / problem_key(plan) /
                              utc_now("%Y%m%dT%H%M%SZ"));
  // Beside its final place or, where that is there and may be a mount or the working directory, in it.
  std::error_code absent;
  place_ = fs::exists(wanted_, absent) ? wanted_ : wanted_.has_parent_path() ? wanted_.parent_path() : ".";
  make_directories(place_);
  sweep_scratch(place_);
  scratch_.emplace(place_ / "profile", Scratch::Kind::directory);
  directory = scratch_->path() / "run";
  make_directories(directory);
  write("params.json", profile.problem.dump(2) + "\n");
  for (const auto& stage : request.tuning.stages)
    if (fs::exists(stage.history)) write("tiling/" + stage.kernel + "/autotuning.json", read_file(stage.history));
  for (TiledKernel* kernel : launched_kernels(executable)) {
    write("tiling/" + kernel->name() + ".json", kernel->tiling().dump(2) + "\n");
    for (const auto& file : fs::directory_iterator(kernel->entry().dir))
      if (file.is_regular_file())
        write("compiled/" + kernel->name() + "/" + file.path().filename().string(), read_file(file.path()));
  }
}

void require_knowledge(const ProfileTools& tools) {
  if (!tools.rules.empty()) Rules::load(tools.rules);
  if (!tools.cards.empty()) Cards::load(tools.cards);
}

void Frame::write(const fs::path& name, const std::string& text) const {
  make_directories((directory / name).parent_path());
  write_file_atomic(directory / name, text);
}

void Frame::time(double sustained_seconds) {
  Device& device = request.device;
  const Work work = [&](StreamHandle stream) { request.executable.run(stream); };
  auto times = [&](const Timing& timing) { return times_of(timing, profile.cost, profile.roofline.predicted_us); };
  profile.timing.cold = times(measure_cold(device, work, request.bench_runs));
  profile.timing.burst = times(measure_burst(device, work, std::min(request.bench_runs, 7)));
  if (device.is_gpu() && sustained_seconds > 0)
    profile.timing.sustained = times(measure_sustained(device, work, sustained_seconds));

  if (launched_kernels(request.executable).size() == 1) return;
  const std::vector<Executable*> stages = profiled_stages(request.executable);
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const Timing alone = measure_burst(
        device, [&](StreamHandle stream) { stages[i]->run(stream); }, std::min(request.bench_runs, 5));
    profile.stages[i].burst = times_of(alone, stages[i]->cost(), profile.stages[i].predicted_us);
  }
}

void Frame::set_metrics(std::size_t stage, const std::map<std::string, double>& metrics, const std::string& source) {
  for (const auto& [name, value] : metrics)
    if (std::isfinite(value)) profile.stages[stage].metrics[name] = value;
  profile.stages[stage].metrics_source = source;
}

void Frame::judge() {
  if (!request.tools.rules.empty())
    assess(profile, Rules::load(request.tools.rules),
           request.tools.cards.empty() ? Cards() : Cards::load(request.tools.cards));
  for (const auto& file : fs::recursive_directory_iterator(directory))
    if (file.is_regular_file())
      profile.files[file.path().lexically_relative(directory).generic_string()] = file.file_size();
  write("profile.json", to_json(profile).dump(2) + "\n");
  write("report.md", render_report(profile));
}

ProfileResult Frame::publish() {
  std::error_code failed;
  if (place_ == wanted_) {
    for (const auto& one : fs::directory_iterator(directory))
      if (!failed) fs::rename(one.path(), wanted_ / one.path().filename(), failed);
  } else {
    if (request.out_dir.empty()) wanted_ = fresh_directory(wanted_);  // another process may have been faster
    fs::rename(directory, wanted_, failed);
  }
  if (failed) {
    require_out_dir(request.out_dir);
    fail_file("write", wanted_, failed.value());
  }
  sync_directory(place_);
  return {profile, wanted_};
}

}  // namespace hypermla
