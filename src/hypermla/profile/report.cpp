#include "hypermla/base/error.h"
#include "hypermla/profile/profile.h"

namespace hypermla {
namespace {

std::string fields_row(const Json& object) {
  std::string text;
  for (const auto& [key, value] : object.items()) {
    if (!text.empty()) text += ", ";
    text += key + "=" + (value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

std::string timing_rows(const std::string& name, const Json& timing) {
  std::string row = fmt::format("| {} | {:.1f} | {:.1f} to {:.1f} | {:.1f} | {:.0f} | {:.1f} % |", name,
                                timing.at("median_us").get<double>(), timing.at("low_us").get<double>(),
                                timing.at("high_us").get<double>(), timing.at("tflops").get<double>(),
                                timing.at("gbps").get<double>(), 100 * timing.at("roofline_fraction").get<double>());
  row += timing.contains("sm_MHz") ? fmt::format(" {:.0f} MHz, {:.0f} W |\n", timing["sm_MHz"].get<double>(),
                                                 timing["watts"].get<double>())
                                   : " |\n";
  return row;
}

}  // namespace

std::string render_report(const Json& profile) {
  const Json& device = profile.at("device");
  const Json& roofline = profile.at("roofline");
  const Json& cost = profile.at("cost");
  std::string text = fmt::format("# Profile: {} ({})\n\n", profile.at("kernel").get<std::string>(),
                                 profile.at("version").get<std::string>());
  text += fmt::format("{} on {} ({}{}), {} mode.\n\n", profile.at("date").get<std::string>(),
                      device.at("name").get<std::string>(), device.at("arch").get<std::string>(),
                      device.at("driver").get<std::string>().empty()
                          ? ""
                          : ", driver " + device.at("driver").get<std::string>(),
                      profile.at("mode").get<std::string>());
  text += "Configuration: " + fields_row(profile.at("problem")) + "\n\n";
  text += fmt::format("Roofline: {:.3g} GFLOP and {:.3g} GB, {:.1f} FLOP/byte; at {:.4g} TFLOP/s and {:.4g} GB/s (ridge "
                      "{:.1f}) that is {:.1f} us, {} bound.\n\n",
                      cost.at("flops").get<double>() * 1e-9, cost.at("bytes").get<double>() * 1e-9,
                      cost.at("intensity").get<double>(), roofline.at("peak_tflops").get<double>(),
                      roofline.at("peak_gbps").get<double>(), roofline.at("ridge").get<double>(),
                      roofline.at("predicted_us").get<double>(), roofline.at("bound").get<std::string>());
  text += "| time | median us | 5 to 95 % | TFLOP/s | GB/s | of roofline | clock and power |\n|---|---|---|---|---|---|---|\n";
  for (const auto& [name, timing] : profile.at("timing").items()) text += timing_rows(name, timing);
  text += "\n| stage | grid | tiling | registers | frame B/thread | shared B | burst us |\n|---|---|---|---|---|---|---|\n";
  for (const Json& stage : profile.at("stages")) {
    auto number = [&](const char* key) { return stage.contains(key) ? stage[key].dump() : "-"; };
    text += fmt::format("| {} | {} | {} | {} | {} | {} | {} |\n", stage.at("name").get<std::string>(),
                        stage.at("grid").dump(), fields_row(stage.at("tiling")), number("registers"),
                        number("frame_bytes"), number("shared_bytes"),
                        stage.contains("burst") ? fmt::format("{:.1f}", stage["burst"]["median_us"].get<double>()) : "-");
  }
  if (profile.contains("host_us_per_run"))
    text += fmt::format("\nA call of run() costs the host {:.1f} us.\n", profile["host_us_per_run"].get<double>());
  text += "\nCold: the cache is flushed before each run. Burst: a few runs back to back after a rest. Sustained: after the board was "
          "kept busy. Graph replays, events; clocks as found.\n";
  return text;
}

}  // namespace hypermla
