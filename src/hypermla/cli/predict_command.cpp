#include <algorithm>
#include <cstdio>
#include <optional>

#include "hypermla/base/error.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/options.h"
#include "hypermla/cli/session.h"

namespace hypermla {

int predict_command(const Words& words) {
  const bool asks = !words.empty() && (words[0] == "--help" || words[0] == "-h");
  if (words.empty() || asks) {
    fmt::print(
        "Usage: hypermla predict <kernel> [version] [problem flags]\n\n"
        "Roofline time of a kernel on every device of conf/devices.json and every measured one, without running it.\n"
        "On each it is planned for that device: the language that is the fast one there, and the n that the model "
        "takes.\n");
    if (!asks) fail("which kernel? For example: hypermla predict flash_mla --b=32 --s=16 --t=4096");
    return 0;
  }
  if (words[0].starts_with("-"))
    fail("the kernel comes first, before '{}': hypermla predict <kernel> {}", words[0], words[0]);
  const bool versioned = words.size() > 1 && words[1].rfind("-", 0) != 0;
  const std::string version = versioned ? words[1] : "";
  const std::vector<KernelEntry> everywhere = Registry::instance().find_all(words[0], version);
  CLI::App app(fmt::format("{}\n", everywhere.front().summary), "hypermla predict " + words[0]);
  Settings said;
  add_problem_fields(app, everywhere, said);
  if (!parse(app, {words.begin() + (versioned ? 2 : 1), words.end()})) return 0;

  const DeviceTable table = known_devices(Environment::detect());
  std::vector<std::pair<std::string, std::string>>
      groups;  // of devices with the same plan: what is planned, their lines
  std::string refusals;
  std::optional<Error> refused;
  for (const std::string& name : table.names()) try {
      const PlannedDevice on = planned_device(table, name);
      const auto [entry, plan, chosen] =
          configure(Registry::instance().find_all(words[0], version, on.target.arch), on, said);
      const std::unique_ptr<Executable> executable = plan_empty(*plan);
      const Cost cost = executable->cost();
      const std::string planned =
          fmt::format("{} {}: {:.4g} GFLOP, {:.4g} GB, {:.1f} FLOP/byte\n", entry.full_name(), problem_key(*plan),
                      cost.flops * 1e-9, cost.bytes * 1e-9, cost.intensity());
      const Prediction prediction = executable->predict(on.spec, plan->dtype());
      auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& one) { return one.first == planned; });
      if (group == groups.end()) group = groups.insert(groups.end(), {planned, ""});
      group->second += fmt::format("{:<28} {:>12.1f} us  {} bound, ridge {:.1f}\n", name, prediction.seconds * 1e6,
                                   bound_name(prediction.bound), ridge(on.spec, plan->dtype()) * cost.product_rate());
    } catch (const Error& error) {
      refused = error;
      refusals += fmt::format("{:<28} none: {}\n", name, error.what());
    }
  if (groups.empty()) throw *refused;
  for (const auto& [planned, lines] : groups) fmt::print("{}{}", planned, lines);
  fmt::print("{}", refusals);
  return 0;
}

}  // namespace hypermla
