#include "hypermla/cli/subcommand.h"

#include <cstdio>

#include "hypermla/base/error.h"

namespace hypermla {

int run_subcommand(const std::string& command, const std::vector<Subcommand>& all, const Words& words) {
  std::vector<std::string> names;
  std::string usage = fmt::format("Usage: hypermla {} <command> [arguments]\n\nCommands:\n", command);
  for (const auto& [name, arguments, summary, run] : all) {
    names.push_back(name);
    usage += fmt::format("  {:<28} {}\n", fmt::format("{} {}", name, arguments), summary);
  }
  if (words.empty()) fail("{} what? One of: {}; see hypermla {} --help", command, fmt::join(names, ", "), command);
  const std::string& first = words.front();
  if (first == "--help" || first == "-h") return std::fputs(usage.c_str(), stdout), 0;
  for (const Subcommand& one : all)
    if (first == one.name) return one.run({words.begin() + 1, words.end()});
  fail("unknown command '{} {}'; did you mean {}? See hypermla {} --help", command, first, nearest(first, names),
       command);
}

}  // namespace hypermla
