// The step from a profile to the next version of a kernel, as data: what the profiler says, and the task for the
// designer of the version. docs/workflow.md describes the cycle that it is part of.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "hypermla/profile/profile.h"
#include "hypermla/profile/rules.h"

namespace hypermla {

struct NextInput {
  Profile profile;                                // judged by assess(), with the cards
  std::string run = {};                           // as the user named it, for commands
  std::optional<Profile> baseline = {};           // of the same problem, judged
  std::string design = {};                        // flash_mla
  std::string directory = {};                     // kernels/cute/mla/flash_mla/flash_mla
  int next_version = 1;                           // the first number that no version of the design has or had
  std::map<std::string, std::string> bases = {};  // the design's first version in each language, by its full name
};

// {"profile": {kernel, version, device, problem, run, stages: [{stage, us, tensor_pct, dram_pct, occupancy_pct,
//   bottleneck, key_issue}], bottleneck, root_cause, opportunities: [{id, name, stage, gain_percent, trigger,
//   card}], refuted: [{id, name, stage, trigger, figure, card}], baseline: [{metric, previous, current, change}]},
//  "task": {task, from, start, bottleneck, language, why_language, optimizations: [{name, rationale, card}],
//   constraints: [..], trials: [..], gates: [{gate, command}]}}
// Numbers that were not measured are absent, the stage of an opportunity where there is only one, and
// `start`, the command that begins the version, where there is nothing to copy in its language.
Json next_step(const NextInput& input, const Cards& cards);

// The same as Markdown.
std::string render_next_step(const Json& step);

}  // namespace hypermla
