// Named numbers of a stage: its counters under their own names, and quantities made from them, from times and from
// cost. Rules, reports and comparisons read nothing else of a stage.
#pragma once

#include <set>

#include "hypermla/knowledge/predicate.h"
#include "hypermla/profile/profile.h"

namespace hypermla {

// The signals of one of the profile's stages. Pure; only what the profile holds becomes a signal.
Signals stage_signals(const Profile& profile, const ProfileStage& stage);

// The names of all signals that a stage can have: counters of metrics.h, and the quantities.
std::set<std::string> signal_names();

}  // namespace hypermla
