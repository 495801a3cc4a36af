#include "hypermla/profile/frame.h"

#include <algorithm>

#include "hypermla/base/date.h"
#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/profile/rules.h"
#include "hypermla/device/measure.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

constexpr int kSchema = 2;

// Profiles of one second must not share a directory.
fs::path fresh_directory(const fs::path& wanted) {
  fs::path directory = wanted;
  for (int i = 2; fs::exists(directory); ++i) directory = wanted.string() + "-" + std::to_string(i);
  return directory;
}

// What a time means against the roofline and in rates.
Json rates(const Cost& cost, double seconds, double predicted_seconds) {
  return {{"tflops", cost.flops / seconds * 1e-12},
          {"gbps", cost.bytes / seconds * 1e-9},
          {"roofline_fraction", predicted_seconds / seconds}};
}

Json describe_stage(TiledKernel& kernel, const DeviceSpec& spec, DType dtype) {
  const Prediction prediction = kernel.predict(spec, dtype);
  const Grid grid = kernel.grid();
  Json stage;
  stage["name"] = kernel.name();
  stage["tiling"] = kernel.tiling();
  stage["grid"] = {grid.x, grid.y, grid.z};
  stage["artifact"] = kernel.entry().dir.filename().string();  // name, target and hash of source and tiling
  for (const char* key : {"compiler", "registers", "frame_bytes", "shared_bytes"})
    if (kernel.entry().report.contains(key)) stage[key] = kernel.entry().report[key];
  stage["flops"] = kernel.cost().flops;
  stage["bytes"] = kernel.cost().bytes;
  stage["predicted_us"] = prediction.seconds * 1e6;
  stage["bound"] = bound_name(prediction.bound);
  return stage;
}

// Members that run at once are one stage more, behind all kernels: measured together, judged in their place.
Json describe_group(ConcurrentKernels& group, const std::vector<TiledKernel*>& kernels, const DeviceSpec& spec,
                    DType dtype) {
  const Prediction prediction = group.predict(spec, dtype);
  double blocks = 0;
  Json stage;
  stage["name"] = group.name();
  stage["members"] = Json::array();
  for (const TiledKernel* kernel : kernels) {
    stage["members"].push_back(kernel->name());
    blocks += kernel->grid().blocks();
  }
  if (!group.partition().empty()) stage["partition"] = group.partition();
  stage["tiling"] = Json::object();
  stage["grid"] = {blocks, 1, 1};
  stage["flops"] = group.cost().flops;
  stage["bytes"] = group.cost().bytes;
  stage["predicted_us"] = prediction.seconds * 1e6;
  stage["bound"] = bound_name(prediction.bound);
  return stage;
}

// A board does not tell whether its clocks are locked; the script that locks them leaves a note.
Json clocks(const ProfileRequest& request) {
  Json json = {{"locked", false}};
  std::error_code ignored;
  if (request.tools.clock_lock.empty() || !fs::exists(request.tools.clock_lock, ignored)) return json;
  const Json note = Json::parse(read_file(request.tools.clock_lock), nullptr, false);
  if (!note.is_object()) return json;
  json = note;
  json["locked"] = true;
  return json;
}

}  // namespace

Frame::Frame(const ProfileRequest& asked, ProfileMode mode) : request(asked) {
  KernelPlan& plan = request.plan;
  Executable& executable = request.executable;
  const DeviceInfo& info = request.device.info();
  const Cost cost = executable.cost();
  const Prediction prediction = executable.predict(request.spec, plan.dtype());

  profile["schema"] = kSchema;
  profile["mode"] = profile_mode_name(mode);
  profile["date"] = utc_now("%Y-%m-%dT%H:%M:%SZ");
  profile["kernel"] = request.kernel.full_name();
  profile["version"] = request.kernel.version;
  if (!request.label.empty()) profile["label"] = request.label;
  profile["problem"] = to_json(plan.problem_fields());
  profile["device"] = {
      {"name", info.name}, {"arch", info.arch}, {"processors", info.processors}, {"driver", info.driver}};
  if (request.device.is_gpu()) profile["clocks"] = clocks(request);
  profile["roofline"] = {{"peak_tflops", request.spec.peak_tflops(plan.dtype())},
                         {"peak_gbps", request.spec.peak_gbps},
                         {"ridge", ridge(request.spec, plan.dtype())},
                         {"predicted_us", prediction.seconds * 1e6},
                         {"bound", bound_name(prediction.bound)}};
  for (const char* key : {"matmul_burst_tflops", "matmul_sustained_tflops", "read_GBps", "copy_GBps"})
    if (request.spec.measured.contains(key)) profile["roofline"][key] = request.spec.measured[key];
  profile["cost"] = {{"flops", cost.flops}, {"bytes", cost.bytes}, {"intensity", cost.intensity()}};
  profile["timing"] = Json::object();
  profile["stages"] = Json::array();
  for (TiledKernel* kernel : launched_kernels(executable))
    profile["stages"].push_back(describe_stage(*kernel, request.spec, plan.dtype()));
  for (ConcurrentKernels* group : launched_groups(executable)) {
    const std::vector<TiledKernel*> members = launched_kernels(*group);
    for (Json& stage : profile["stages"])
      for (const TiledKernel* member : members)
        if (stage["name"] == member->name()) {
          stage["group"] = group->name();
          if (member->processors()) stage["processors"] = member->processors();
        }
    profile["stages"].push_back(describe_group(*group, members, request.spec, plan.dtype()));
  }

  directory = request.out_dir;
  if (directory.empty())
    directory = fresh_directory(fs::path("out/profiles") / profile_mode_name(mode) / request.kernel.full_name() /
                                problem_key(plan) / utc_now("%Y%m%dT%H%M%SZ"));
  make_directories(directory);
  write("params.json", profile["problem"].dump(2) + "\n");
  for (TiledKernel* kernel : launched_kernels(executable)) {
    write("tiling/" + kernel->name() + ".json", kernel->tiling().dump(2) + "\n");
    for (const auto& stage : request.tuning.stages)
      if (stage.kernel == kernel->name() && fs::exists(stage.history))
        write("tiling/" + kernel->name() + "/autotuning.json", read_file(stage.history));
    for (const auto& file : fs::directory_iterator(kernel->entry().dir))
      if (file.is_regular_file())
        write("compiled/" + kernel->name() + "/" + file.path().filename().string(), read_file(file.path()));
  }
}

void Frame::write(const fs::path& name, const std::string& text) const {
  make_directories((directory / name).parent_path());
  write_file_atomic(directory / name, text);
}

void Frame::time(double sustained_seconds) {
  Device& device = request.device;
  const Cost cost = request.executable.cost();
  const double predicted = profile["roofline"]["predicted_us"].get<double>() * 1e-6;
  const Work work = [&](StreamHandle stream) { request.executable.run(stream); };
  auto add = [&](const char* flavour, const Timing& measured) {
    profile["timing"][flavour] = to_json(measured);
    profile["timing"][flavour].update(rates(cost, measured.median(), predicted));
  };
  add("cold", measure_cold(device, work, request.bench_runs));
  add("burst", measure_burst(device, work, std::min(request.bench_runs, 7)));
  if (device.is_gpu() && sustained_seconds > 0) add("sustained", measure_sustained(device, work, sustained_seconds));

  const std::vector<TiledKernel*> kernels = launched_kernels(request.executable);
  if (kernels.size() == 1) return;
  std::vector<Executable*> stages(kernels.begin(), kernels.end());
  for (ConcurrentKernels* group : launched_groups(request.executable)) stages.push_back(group);
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const Timing alone = measure_burst(
        device, [&](StreamHandle stream) { stages[i]->run(stream); }, std::min(request.bench_runs, 5));
    Json& stage = profile["stages"][i];
    stage["burst"] = to_json(alone);
    stage["burst"].update(rates(stages[i]->cost(), alone.median(), stage["predicted_us"].get<double>() * 1e-6));
  }
}

void Frame::give_up(const std::string& why) { profile["missing"] = why; }

ProfileResult Frame::finish() {
  if (!request.tools.rules.empty()) assess(profile, Rules::load(request.tools.rules));
  write("profile.json", profile.dump(2) + "\n");
  write("report.md", render_report(profile));
  return {profile, directory};
}

}  // namespace hypermla
