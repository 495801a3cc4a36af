#include "hypermla/base/error.h"
#include "hypermla/profile/metrics.h"
#include "hypermla/profile/profile.h"
#include "hypermla/profile/timeline.h"

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
  row += timing.contains("sm_MHz")
             ? fmt::format(" {:.0f} MHz, {:.0f} W |\n", timing["sm_MHz"].get<double>(), timing["watts"].get<double>())
             : " |\n";
  return row;
}

std::string signal(const Json& stage, const char* name, const char* format = "{:.1f}") {
  const Json signals = stage.value("signals", Json::object());
  return signals.contains(name) ? fmt::format(fmt::runtime(format), signals[name].get<double>()) : "-";
}

std::string verdict(const Json& profile) {
  const Json& found = profile.at("classification");
  std::string evidence;
  for (const Json& item : found.at("evidence")) evidence += (evidence.empty() ? "" : ", ") + item.get<std::string>();
  std::string text = "## Bottleneck\n\n";
  text += fmt::format("**{}**{} (confidence {}). {}{}\n\n", found.at("class").get<std::string>(),
                      profile.at("stages").size() > 1 ? " in " + found.at("stage").get<std::string>() : "",
                      found.at("confidence").get<std::string>(), found.at("why").get<std::string>(),
                      evidence.empty() ? "" : " Evidence: " + evidence + ".");
  if (!profile.at("opportunities").empty()) text += "Next, by estimated gain:\n\n";
  int number = 0;
  for (const Json& one : profile.at("opportunities"))
    text += fmt::format("{}. {} ({}) - est. {:.0f} % - {}. {}\n", ++number, one.at("name").get<std::string>(),
                        one.at("id").get<std::string>(), one.at("gain_percent").get<double>(),
                        one.at("trigger").get<std::string>(), one.at("why").get<std::string>());
  return text + (number ? "\n" : "");
}

std::string judged_stages(const Json& profile) {
  std::string text =
      "| stage | us | tensor % | DRAM % | occupancy % | L2 hit % | bottleneck | key issue "
      "|\n|---|---|---|---|---|---|---|---|\n";
  for (const Json& stage : profile.at("stages")) {
    std::string issues;
    for (const Json& issue : stage.at("issues"))
      issues += (issues.empty() ? "" : "; ") + issue.at("name").get<std::string>() + " (" +
                issue.at("trigger").get<std::string>() + ")";
    text += fmt::format("| {} | {} | {} | {} | {} | {} | {} | {} |\n", stage.at("name").get<std::string>(),
                        signal(stage, "time_us"), signal(stage, "tensor_pct"), signal(stage, "dram_pct"),
                        signal(stage, "occupancy_pct"), signal(stage, "l2_hit_pct"),
                        stage.at("classification").at("class").get<std::string>(), issues.empty() ? "none" : issues);
  }
  return text + "\n";
}

// Groups of kernels that run at once, and how that compares with one after the other.
std::string groups_note(const Json& profile) {
  std::string text;
  for (const Json& group : profile.at("stages")) {
    if (!group.contains("members")) continue;
    double sum = 0;
    for (const Json& stage : profile["stages"])
      if (stage.value("group", "") == group["name"] && stage.contains("burst"))
        sum += stage["burst"]["median_us"].get<double>();
    std::string how = "they run at once";
    if (!profile.contains("clocks"))
      how = "a CPU runs them one after the other";
    else if (group.contains("partition"))
      how += fmt::format(", on {} SMs of their own", fmt::join(group["partition"].get<std::vector<int>>(), " and "));
    text +=
        fmt::format("{} are the stage {}: {}.", fmt::join(group["members"].get<std::vector<std::string>>(), " and "),
                    group["name"].get<std::string>(), how);
    if (group.contains("burst"))
      text += fmt::format(" Together {:.1f} us; each alone on the whole device, in sum {:.1f} us.",
                          group["burst"]["median_us"].get<double>(), sum);
    text += "\n\n";
  }
  return text;
}

std::string against_roofline(const Json& profile) {
  std::string text =
      "| stage | predicted us | measured us | of roofline | FLOP, algorithm | FLOP, executed | bytes, algorithm | "
      "bytes, DRAM |\n|---|---|---|---|---|---|---|---|\n";
  for (const Json& stage : profile.at("stages"))
    text += fmt::format("| {} | {} | {} | {} | {} | {} | {} | {} |\n", stage.at("name").get<std::string>(),
                        signal(stage, "predicted_us"), signal(stage, "time_us"),
                        signal(stage, "roofline_fraction", "{:.2f}"), signal(stage, "flops", "{:.4g}"),
                        signal(stage, "executed_flops", "{:.4g}"), signal(stage, "bytes", "{:.4g}"),
                        signal(stage, "dram_bytes", "{:.4g}"));
  return text + "\n";
}

std::string all_metrics(const Json& profile) {
  std::string header = "| metric |", rule = "|---|", text;
  for (const Json& stage : profile.at("stages")) {
    header += " " + stage.at("name").get<std::string>() + " |";
    rule += "---|";
  }
  for (const Metric& metric : metric_catalogue()) {
    std::string row;
    bool any = false;
    for (const Json& stage : profile.at("stages")) {
      const Json metrics = stage.value("metrics", Json::object());
      any = any || metrics.contains(metric.name);
      row += metrics.contains(metric.name) ? fmt::format(" {:.5g} |", metrics[metric.name].get<double>() * metric.scale)
                                           : " - |";
    }
    if (any)
      text += fmt::format("| {}{} |{}\n", metric.label, *metric.unit ? fmt::format(", {}", metric.unit) : "", row);
  }
  return text.empty() ? "" : header + "\n" + rule + "\n" + text + "\n";
}

std::string counters_note(const Json& counters) {
  const std::string source = counters.at("source");
  std::string text = source == "none" ? "Source of the profile: none." : "Source of the profile: " + source;
  if (counters.contains("passes"))
    text += fmt::format(", {}, {} passes, L2 flushed before each", counters["chip"].get<std::string>(),
                        counters["passes"].get<int>());
  if (source != "none") text += ". Times: events. Registers, frame, shared memory: the compiler's.";
  const Json missing_groups = counters.value("missing_groups", Json::object());
  for (const auto& [group, why] : missing_groups.items())
    text += fmt::format(" No counters of {} as a whole: {}.", group, why.get<std::string>());
  for (const Json& attempt : counters.value("attempts", Json::array())) text += " " + attempt.get<std::string>() + ".";
  return text + "\n\n";
}

std::string clocks_note(const Json& clocks) {
  if (!clocks.at("locked").get<bool>()) return " Clocks not locked: the measured ones are in the table.";
  return fmt::format(" Clocks locked at {} MHz (SM) and {} MHz (memory).",
                     clocks.value("sm_MHz", Json("default")).dump(),
                     clocks.value("memory_MHz", Json("default")).dump());
}

}  // namespace

std::string render_report(const Json& profile) {
  const Json& device = profile.at("device");
  const Json& roofline = profile.at("roofline");
  const Json& cost = profile.at("cost");
  std::string text = fmt::format("# Profile: {} ({})\n\n", profile.at("kernel").get<std::string>(),
                                 profile.at("version").get<std::string>());
  text += fmt::format(
      "{} on {} ({}{}), {} mode.{}\n\n", profile.at("date").get<std::string>(), device.at("name").get<std::string>(),
      device.at("arch").get<std::string>(),
      device.at("driver").get<std::string>().empty() ? "" : ", driver " + device.at("driver").get<std::string>(),
      profile.at("mode").get<std::string>(),
      profile.contains("label") ? " " + profile["label"].get<std::string>() + "." : "");
  if (profile.contains("missing"))
    text += fmt::format("**Not measured: {}.**\n\n", profile["missing"].get<std::string>());
  text += "Configuration: " + fields_row(profile.at("problem")) + "\n\n";
  text += fmt::format(
      "Roofline: {:.3g} GFLOP and {:.3g} GB, {:.1f} FLOP/byte; at {:.4g} TFLOP/s and {:.4g} GB/s (ridge "
      "{:.1f}) that is {:.1f} us, {} bound.\n\n",
      cost.at("flops").get<double>() * 1e-9, cost.at("bytes").get<double>() * 1e-9, cost.at("intensity").get<double>(),
      roofline.at("peak_tflops").get<double>(), roofline.at("peak_gbps").get<double>(),
      roofline.at("ridge").get<double>(), roofline.at("predicted_us").get<double>(),
      roofline.at("bound").get<std::string>());
  if (profile.contains("classification")) text += verdict(profile) + judged_stages(profile) + against_roofline(profile);
  if (profile.contains("timeline")) text += render_timeline(profile["timeline"]);
  if (profile.contains("ncu")) text += profile["ncu"].at("report").get<std::string>();
  text +=
      "| time | median us | 5 to 95 % | TFLOP/s | GB/s | of roofline | clock and power "
      "|\n|---|---|---|---|---|---|---|\n";
  for (const auto& [name, timing] : profile.at("timing").items()) text += timing_rows(name, timing);
  text +=
      "\n| stage | grid | tiling | registers | frame B/thread | shared B | burst us |\n|---|---|---|---|---|---|---|\n";
  for (const Json& stage : profile.at("stages")) {
    auto number = [&](const char* key) { return stage.contains(key) ? stage[key].dump() : "-"; };
    text += fmt::format(
        "| {} | {} | {} | {} | {} | {} | {} |\n", stage.at("name").get<std::string>(), stage.at("grid").dump(),
        fields_row(stage.at("tiling")), number("registers"), number("frame_bytes"), number("shared_bytes"),
        stage.contains("burst") ? fmt::format("{:.1f}", stage["burst"]["median_us"].get<double>()) : "-");
  }
  if (profile.contains("host_us_per_run"))
    text += fmt::format("\nA call of run() costs the host {:.1f} us.\n", profile["host_us_per_run"].get<double>());
  text += "\n" + groups_note(profile) + all_metrics(profile);
  if (profile.contains("counters")) text += counters_note(profile["counters"]);
  text +=
      "Cold: the cache is flushed before each run. Burst: a few runs back to back after a rest. Sustained: after the "
      "board was "
      "kept busy. Graph replays, events.";
  text += profile.contains("clocks") ? clocks_note(profile["clocks"]) : " Clocks as found.";
  return text + "\n";
}

}  // namespace hypermla
