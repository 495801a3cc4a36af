// Commands of commands: hypermla kb match ..., hypermla devlog add ...
#pragma once

#include <fmt/format.h>

#include <vector>

#include "hypermla/cli/commands.h"

namespace hypermla {

struct Subcommand {
  const char *name, *arguments, *summary;
  int (*run)(const Words&);
};

// Runs the one that the first word names; prints all where that is --help. Throws Error naming the nearest.
int run_subcommand(const std::string& command, const std::vector<Subcommand>& all, const Words& words);

}  // namespace hypermla
