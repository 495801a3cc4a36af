// Finds the profilers of a machine.
#pragma once

#include "hypermla/profile/profile.h"

namespace hypermla {

// `toolkits`: roots of CUDA installations or of the wheels' tree, the best first. `path`: the directories in which
// programs are looked for before the usual places, separated by colons. Looks at files only, starts nothing.
ProfileTools find_profile_tools(const std::vector<std::filesystem::path>& toolkits, const std::string& path);

}  // namespace hypermla
