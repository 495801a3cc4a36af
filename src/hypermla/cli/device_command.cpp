#include <cstdio>

#include "hypermla/base/date.h"
#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/options.h"
#include "hypermla/cli/session.h"
#include "hypermla/roofline/roofline.h"
#include "hypermla/tune/ceilings.h"
#include "hypermla/tune/reach.h"

namespace hypermla {
namespace {

void print_device(const Device& device) {
  const DeviceInfo& info = device.info();
  fmt::print("{}: {}, {} {}, {:.1f} GB, {:.0f} MB last-level cache{}\n", info.name, info.arch, info.processors,
             device.is_gpu() ? "SMs" : "cores", info.memory_bytes * 1e-9, info.cache_bytes / 1048576.0,
             info.driver.empty() ? "" : ", driver " + info.driver);
}

}  // namespace

int device_command(const Words& words) {
  std::string name = "auto";
  bool measure = false;
  CLI::App app("What was found on this machine: devices, driver, compilers, caches.\n", "hypermla device");
  app.add_option("--device", name, "the device to measure: auto (the first GPU, else the CPU), cpu, cuda or cuda:N");
  app.add_flag("--measure", measure,
               "measure its ceilings, and what kernels reach of them, and add both to the table of devices");
  if (!parse(app, words)) return 0;

  Session session(name);
  if (const auto why = cuda_unavailable()) fmt::print("GPU        none: {}\n", *why);
  fmt::print("device     ");
  print_device(*session.device);
  const Json tools = describe(session.environment.toolchain);
  auto found = [](const std::string& path, const std::string& version) {
    return path.empty() ? std::string("not found") : path + " (" + version + ")";
  };
  fmt::print("tile       {}\n", found(tools["cuda_root"], "NVRTC " + tools["nvrtc"].get<std::string>()));
  fmt::print("c++        {}\n", found(tools["cxx"], tools["cxx_version"]));
  fmt::print("kernels    {}\n", session.environment.kernel_root().string());
  if (const auto& own = session.environment.own_kernels; !own.empty()) fmt::print("own        {}\n", own.string());
  fmt::print("cache      {}\n", session.environment.cache.string());
  auto peak = [&](DType dtype) { return session.planned.spec.peak_tflops(dtype); };
  fmt::print("roofline   {}: {:.4g} TFLOP/s bfloat16, {:.4g} GB/s, ridge {:.1f} FLOP/byte\n", session.planned.spec.name,
             peak(DType::bfloat16), session.planned.spec.peak_gbps, ridge(session.planned.spec, DType::bfloat16));
  if (!measure) return 0;

  require_writable(session.environment.measured_devices().parent_path());  // else it is all for nothing
  session.runs("one of those that measure this device");
  Json measured = measure_ceilings(session.device, session.compiler);
  measured["date"] = utc_now();
  // Of an earlier time, until the present one is known: what is interrupted loses nothing.
  if (const Json& before = session.planned.spec.measured; before.contains("reach")) measured["reach"] = before["reach"];
  const auto save = [&] {
    save_measured(session.environment.measured_devices(), session.device->info().name, measured);
  };
  save();
  for (const auto& [key, value] : measured.items())
    if (!value.is_object())
      fmt::print("measured   {:<26} {}\n", key,
                 value.is_number() ? fmt::format("{:.5g}", value.get<double>()) : value.get<std::string>());
  std::fflush(stdout);
  // Kernels are judged by the ceilings that were just measured.
  const PlannedDevice planned = planned_device(session.environment.devices(), *session.device);
  const MeasuredReach kernels = measure_reach(Registry::instance(), planned, session.device, session.compiler);
  for (const std::string& remark : kernels.remarks) fmt::print("reach      {}\n", remark);
  if (!kernels.reach.empty()) {
    measured["reach"] = kernels.reach;
    save();
  }
  fmt::print("added to   {}\n", session.environment.measured_devices().string());
  return 0;
}

}  // namespace hypermla
