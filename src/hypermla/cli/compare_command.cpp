#include <cstdio>

#include "hypermla/base/error.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/options.h"
#include "hypermla/profile/compare.h"

namespace hypermla {

int compare_command(const Words& words) {
  std::string a, b;
  double noise = 1;
  bool json = false;
  CLI::App app(
      "Is run B faster than run A? A run is a directory below out/profiles, or its profile.json.\n"
      "Cold times decide; SLOWER in another is SLOWER, or UNCLEAR where its clock moved or cold times are FASTER.\n"
      "Runs of two devices are UNCLEAR.\n"
      "Exit status: 0 for SAME and FASTER, 1 for SLOWER, 3 for UNCLEAR.\n",
      "hypermla compare");
  app.add_option("RUN_A", a, "the run to compare with")->required();
  app.add_option("RUN_B", b, "the run to judge")->required();
  app.add_option("--noise", noise, "percent by which medians may differ and still be the SAME (default 1)")
      ->check(within(0, 100));
  app.add_flag("--json", json, "the comparison as JSON");
  if (!parse(app, words)) return 0;
  const Comparison comparison = compare_profiles(load_profile(a), load_profile(b), noise / 100);
  fmt::print("{}", json ? to_json(comparison).dump(2) + "\n" : render_comparison(comparison));
  return comparison.verdict == Verdict::slower ? 1 : comparison.verdict == Verdict::unclear ? 3 : 0;
}

}  // namespace hypermla
