#include "hypermla/base/error.h"
#include "hypermla/device/architecture.h"
#include "hypermla/profile/metrics.h"
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

std::string check_text(const Profile& profile) {
  if (!profile.check) return "not asked for (--check)";
  std::string errors;
  for (const auto& [output, error] : profile.check->relative_errors)
    errors += fmt::format("{}{} {:.1e}", errors.empty() ? "" : ", ", output, error);
  return fmt::format("{} (relative error {})", profile.check->passed ? "passed" : "FAILED", errors);
}

std::string heading(const Profile& profile) {
  const auto& device = profile.device;
  const auto& roofline = profile.roofline;
  std::string text = fmt::format("# Profile: {} ({})\n\n", profile.kernel, profile.version);
  text += fmt::format("{} on {} ({}{}), {} mode.{}\n\n", profile.date, device.name, device.arch,
                      device.driver.empty() ? "" : ", driver " + device.driver, profile.mode,
                      profile.label.empty() ? "" : " " + profile.label + ".");
  if (!profile.missing.empty()) text += fmt::format("**Not measured: {}.**\n\n", profile.missing);
  text += "Configuration: " + fields_row(profile.problem) + "\n\n";
  if (profile.seed) text += fmt::format("Inputs: random, seed {}. Check: {}.\n\n", *profile.seed, check_text(profile));
  text += fmt::format(
      "Roofline: {:.3g} GFLOP and {:.3g} GB, {:.1f} FLOP/byte; at {:.4g} TFLOP/s and {:.4g} GB/s (ridge {:.1f}) that "
      "is "
      "{:.1f} us, {} bound.\n\n",
      profile.cost.flops * 1e-9, profile.cost.bytes * 1e-9, profile.cost.intensity(), roofline.peak_tflops,
      roofline.peak_gbps, roofline.ridge, roofline.predicted_us, roofline.bound);
  return text;
}

std::string verdict(const Profile& profile) {
  const Bottleneck& found = *profile.bottleneck;
  std::string text =
      fmt::format("## Bottleneck\n\n**{}**{} (confidence {}). {}{}\n\n", found.kind,
                  profile.stages.size() > 1 ? " in " + found.stage : "", found.confidence, found.why,
                  found.evidence.empty() ? "" : fmt::format(" Evidence: {}.", fmt::join(found.evidence, ", ")));
  std::string next, refuted;
  int number = 0;
  for (const Opportunity& one : profile.opportunities) {
    const std::string card = one.card.empty() ? "" : fmt::format(" Card: `{}`.", one.card);
    const std::string id = one.stage.empty() ? one.id : fmt::format("{}, in {}", one.id, one.stage);
    if (one.refuted.empty())
      next += fmt::format("{}. {} ({}) - est. {:.0f} % - {}. {}{}\n", ++number, one.name, id, one.gain_percent,
                          one.trigger, one.why, card);
    else
      refuted += fmt::format("- {} ({}), which {} suggests: {}.{}\n", one.name, id, one.trigger, one.refuted, card);
  }
  if (!next.empty()) text += "Next, by estimated gain:\n\n" + next + "\n";
  if (!refuted.empty()) text += "Measured before on this kernel, and refuted:\n\n" + refuted + "\n";
  return text;
}

std::string signal(const ProfileStage& stage, const char* name, const char* format = "{:.1f}") {
  const auto found = stage.signals.find(name);
  return found == stage.signals.end() ? "-" : fmt::format(fmt::runtime(format), found->second);
}

std::string judged_stages(const Profile& profile) {
  std::string text =
      "| stage | us | tensor % | DRAM % | occupancy % | L2 hit % | bottleneck | key issue "
      "|\n|---|---|---|---|---|---|---|---|\n";
  for (const ProfileStage& stage : profile.stages) {
    std::string issues;
    for (const Issue& issue : stage.issues)
      issues += (issues.empty() ? "" : "; ") + issue.name + " (" + issue.trigger + ")";
    text += fmt::format("| {} | {} | {} | {} | {} | {} | {} | {} |\n", stage.name, signal(stage, "time_us"),
                        signal(stage, "tensor_pct"), signal(stage, "dram_pct"), signal(stage, "occupancy_pct"),
                        signal(stage, "l2_hit_pct"), stage.bottleneck->kind, issues.empty() ? "none" : issues);
  }
  return text + "\n";
}

std::string against_roofline(const Profile& profile) {
  std::string text =
      "| stage | predicted us | measured us | of roofline | FLOP, algorithm | FLOP, executed | bytes, algorithm | "
      "bytes, DRAM |\n|---|---|---|---|---|---|---|---|\n";
  for (const ProfileStage& stage : profile.stages)
    text += fmt::format("| {} | {} | {} | {} | {} | {} | {} | {} |\n", stage.name, signal(stage, "predicted_us"),
                        signal(stage, "time_us"), signal(stage, "roofline_fraction", "{:.2f}"),
                        signal(stage, "flops", "{:.4g}"), signal(stage, "executed_flops", "{:.4g}"),
                        signal(stage, "bytes", "{:.4g}"), signal(stage, "dram_bytes", "{:.4g}"));
  return text + "\n";
}

// Small ones, as of a CPU, keep two digits.
std::string rate(double value, int decimals) {
  return value < 1 ? fmt::format("{:.2g}", value) : fmt::format("{:.{}f}", value, decimals);
}

std::string times(const Profile& profile) {
  std::string text =
      "| time | runs | median us | 5 to 95 % | TFLOP/s | GB/s | of roofline | clock and power "
      "|\n|---|---|---|---|---|---|---|---|\n";
  profile.timing.for_each([&](const char* name, const Times& one) {
    text += fmt::format("| {} | {} | {:.1f} | {:.1f} to {:.1f} | {} | {} | {:.1f} % |", name, one.repetitions,
                        one.median_us, one.low_us, one.high_us, rate(one.tflops, 1), rate(one.gbps, 0),
                        100 * one.roofline_fraction);
    text += one.sm_mhz && one.watts ? fmt::format(" {:.0f} MHz, {:.0f} W |\n", *one.sm_mhz, *one.watts) : " |\n";
  });
  return text;
}

std::string stage_resources(const Profile& profile) {
  auto number = [](const std::optional<int>& value) { return value ? std::to_string(*value) : "-"; };
  std::string text =
      "\n| stage | grid | tiling | registers | frame B/thread | shared B | burst us | 5 to 95 % "
      "|\n|---|---|---|---|---|---|---|---|\n";
  for (const ProfileStage& stage : profile.stages)
    text += fmt::format("| {} | [{}] | {} | {} | {} | {} | {} |\n", stage.name, fmt::join(stage.grid, ","),
                        fields_row(stage.tiling), number(stage.registers), number(stage.frame_bytes),
                        number(stage.shared_bytes),
                        stage.burst ? fmt::format("{:.1f} | {:.1f} to {:.1f}", stage.burst->median_us,
                                                  stage.burst->low_us, stage.burst->high_us)
                                    : "- | -");
  for (const ProfileStage& stage : profile.stages)
    for (const auto& [why, count] : stage.rejected)
      text += fmt::format("\n{}: {} tiling{} rejected, because {}.\n", stage.name, count, count == 1 ? "" : "s", why);
  return text;
}

// Groups of kernels that run at once, and how that compares with one after the other.
std::string groups_note(const Profile& profile) {
  std::string text;
  for (const ProfileStage& group : profile.stages) {
    if (group.members.empty()) continue;
    double sum = 0;
    for (const ProfileStage& stage : profile.stages)
      if (stage.group == group.name && stage.burst) sum += stage.burst->median_us;
    std::string how = "they run at once";
    if (!profile.clocks)
      how = "a CPU runs them one after the other";
    else if (!group.partition.empty())
      how += fmt::format(", on {} SMs of their own", fmt::join(group.partition, " and "));
    text += fmt::format("{} are the stage {}: {}.", fmt::join(group.members, " and "), group.name, how);
    if (group.burst)
      text += fmt::format(" Together {:.1f} us; each alone on the whole device, in sum {:.1f} us.",
                          group.burst->median_us, sum);
    text += "\n\n";
  }
  return text;
}

std::string all_metrics(const Profile& profile) {
  std::string header = "| metric |", rule = "|---|", text;
  for (const ProfileStage& stage : profile.stages) {
    header += " " + stage.name + " |";
    rule += "---|";
  }
  for (const Counter& counter : counter_catalogue()) {
    std::string row;
    bool any = false;
    for (const ProfileStage& stage : profile.stages) {
      const auto value = stage.metrics.find(counter.name);
      const bool counted = value != stage.metrics.end();
      any = any || counted;
      row += counted ? fmt::format(" {:.5g} |", value->second * counter.scale) : " - |";
    }
    if (any)
      text += fmt::format("| {}{} |{}\n", counter.label, *counter.unit ? fmt::format(", {}", counter.unit) : "", row);
  }
  return text.empty() ? "" : header + "\n" + rule + "\n" + text + "\n";
}

std::string counters_note(const Profile::Counters& counters, bool on_gpu) {
  std::string text = "Source of the profile: " + counters.source;
  if (counters.chip)
    text += fmt::format(", {}, {} passes, L2 flushed before each", *counters.chip, counters.passes.value_or(0));
  text += ".";
  if (counters.source != "none" && on_gpu) text += " Times: events. Registers, frame, shared memory: the compiler's.";
  for (const auto& [group, why] : counters.missing_groups)
    text += fmt::format(" No counters of {} as a whole: {}.", group, why);
  for (const std::string& attempt : counters.attempts) text += " " + attempt + ".";
  return text + "\n\n";
}

std::string clocks_note(const std::optional<Profile::Clocks>& clocks) {
  if (!clocks) return " Clocks as found.";
  if (!clocks->locked) return " Clocks not locked: the measured ones are in the table.";
  auto number = [](const std::optional<int>& value) { return value ? std::to_string(*value) : "default"; };
  return fmt::format(" Clocks locked at {} MHz (SM) and {} MHz (memory).", number(clocks->sm_mhz),
                     number(clocks->memory_mhz));
}

}  // namespace

std::string render_report(const Profile& profile) {
  std::string text = heading(profile);
  if (profile.bottleneck) text += verdict(profile) + judged_stages(profile) + against_roofline(profile);
  if (profile.timeline) text += render_timeline(*profile.timeline);
  text += profile.ncu_report + times(profile) + stage_resources(profile);
  if (profile.host_us_per_run)
    text += fmt::format("\nA call of run() costs the host {:.1f} us.\n", *profile.host_us_per_run);
  text += "\n" + groups_note(profile) + all_metrics(profile);
  const bool on_gpu = profile.clocks || is_gpu_arch(profile.device.arch);  // older records lack the clocks
  if (profile.counters) text += counters_note(*profile.counters, on_gpu);
  text += "Cold: the cache is flushed before each run. Burst: a few runs back to back after a rest.";
  if (!on_gpu) return text + " Times by the clock of the host.\n";
  text += " Sustained: after the board was kept busy. Graph replays, events.";
  return text + clocks_note(profile.clocks) + "\n";
}

}  // namespace hypermla
