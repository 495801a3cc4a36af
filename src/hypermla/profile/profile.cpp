#include "hypermla/profile/profile.h"

#include <algorithm>
#include <chrono>
#include <ctime>

#include "hypermla/base/files.h"
#include "hypermla/tune/measure.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

constexpr const char* kModes[] = {"annotation", "event", "ncu", "nsys", "disabled"};
constexpr int kSchema = 1;

std::string time_stamp(const char* format) {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, format, &utc);
  return text;
}

// What a time means against the roofline and in rates.
Json rates(const Cost& cost, double seconds, double predicted_seconds) {
  return {{"tflops", cost.flops / seconds * 1e-12},
          {"gbps", cost.bytes / seconds * 1e-9},
          {"roofline_fraction", predicted_seconds / seconds}};
}

Json measure_all(const ProfileRequest& request, const Work& work, const Cost& cost, double predicted_seconds) {
  Device& device = request.device;
  Json timing;
  auto add = [&](const char* flavour, const Timing& measured) {
    timing[flavour] = to_json(measured);
    timing[flavour].update(rates(cost, measured.median(), predicted_seconds));
  };
  add("cold", measure_cold(device, work, request.bench_runs));
  add("burst", measure_burst(device, work, std::min(request.bench_runs, 7)));
  if (device.is_gpu() && request.sustained_seconds > 0)
    add("sustained", measure_sustained(device, work, request.sustained_seconds));
  return timing;
}

// What a call of run() costs the host: the mean over launches that the device has not caught up with.
double host_microseconds(Device& device, Executable& executable) {
  constexpr int kRuns = 100;
  executable.run(device.stream());
  device.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kRuns; ++i) executable.run(device.stream());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  device.synchronize();
  return seconds / kRuns * 1e6;
}

Json describe_stage(CtKernel& kernel, const DeviceSpec& spec, DType dtype) {
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

void write_artifacts(const ProfileRequest& request, const Json& profile, const fs::path& directory) {
  make_directories(directory);
  write_file_atomic(directory / "params.json", profile.at("problem").dump(2) + "\n");
  for (CtKernel* kernel : request.executable.kernels()) {
    make_directories(directory / "tiling");
    write_file_atomic(directory / "tiling" / (kernel->name() + ".json"), kernel->tiling().dump(2) + "\n");
    for (const auto& stage : request.tuning.stages)
      if (stage.kernel == kernel->name() && fs::exists(stage.history)) {
        make_directories(directory / "tiling" / kernel->name());
        write_file_atomic(directory / "tiling" / kernel->name() / "autotuning.json", read_file(stage.history));
      }
    const fs::path compiled = directory / "compiled" / kernel->name();
    make_directories(compiled);
    for (const auto& file : fs::directory_iterator(kernel->entry().dir))
      if (file.is_regular_file()) write_file_atomic(compiled / file.path().filename(), read_file(file.path()));
  }
  write_file_atomic(directory / "profile.json", profile.dump(2) + "\n");
  write_file_atomic(directory / "report.md", render_report(profile));
}

}  // namespace

ProfileMode profile_mode_from_name(const std::string& name) {
  for (int i = 0; i < 5; ++i)
    if (name == kModes[i]) return ProfileMode(i);
  fail("unknown profiling mode '{}'; choose one of {}", name, fmt::join(kModes, ", "));
}

std::string profile_mode_name(ProfileMode mode) { return kModes[int(mode)]; }

ProfileResult event_profile(const ProfileRequest& request) {
  KernelPlan& plan = request.plan;
  Executable& executable = request.executable;
  const DeviceInfo& info = request.device.info();
  const Cost cost = executable.cost();
  const Prediction prediction = executable.predict(request.spec, plan.dtype());
  const std::vector<CtKernel*> kernels = executable.kernels();

  Json profile;
  profile["schema"] = kSchema;
  profile["mode"] = "event";
  profile["date"] = time_stamp("%Y-%m-%dT%H:%M:%SZ");
  profile["kernel"] = request.kernel.full_name();
  profile["version"] = request.kernel.version;
  profile["problem"] = to_json(plan.problem_fields());
  profile["device"] = {{"name", info.name}, {"arch", info.arch}, {"processors", info.processors}, {"driver", info.driver}};
  profile["roofline"] = {{"peak_tflops", request.spec.peak_tflops(plan.dtype())},
                         {"peak_gbps", request.spec.peak_gbps},
                         {"ridge", ridge(request.spec, plan.dtype())},
                         {"predicted_us", prediction.seconds * 1e6},
                         {"bound", bound_name(prediction.bound)}};
  profile["cost"] = {{"flops", cost.flops}, {"bytes", cost.bytes}, {"intensity", cost.intensity()}};
  profile["timing"] = measure_all(
      request, [&](StreamHandle stream) { executable.run(stream); }, cost, prediction.seconds);
  if (request.device.is_gpu()) profile["host_us_per_run"] = host_microseconds(request.device, executable);
  profile["stages"] = Json::array();
  for (CtKernel* kernel : kernels) {
    Json stage = describe_stage(*kernel, request.spec, plan.dtype());
    if (kernels.size() > 1) {
      const Timing alone = measure_burst(
          request.device, [&](StreamHandle stream) { kernel->run(stream); }, std::min(request.bench_runs, 7));
      stage["burst"] = to_json(alone);
      stage["burst"].update(rates(kernel->cost(), alone.median(), stage["predicted_us"].get<double>() * 1e-6));
    }
    profile["stages"].push_back(stage);
  }

  fs::path directory = request.out_dir;
  if (directory.empty())
    directory = fs::path("out/profiles/event") / request.kernel.full_name() / problem_key(plan) /
                time_stamp("%Y%m%dT%H%M%SZ");
  write_artifacts(request, profile, directory);
  return {profile, directory};
}

}  // namespace hypermla
