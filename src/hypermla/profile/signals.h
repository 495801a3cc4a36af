// Named numbers of a stage: its counters under their own names, and quantities made from them, from times and from
// cost. Rules, reports and comparisons read nothing else of a stage.
#pragma once

#include "hypermla/profile/profile.h"

namespace hypermla {

using Signals = std::map<std::string, double>;

// The signals of one of the profile's stages. Pure; only what the profile holds becomes a signal.
Signals stage_signals(const Profile& profile, const ProfileStage& stage);

}  // namespace hypermla
