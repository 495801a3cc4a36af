// Flags made from field lists, and the messages for wrong command lines.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "hypermla/plan/configure.h"

namespace hypermla {

// Adds --<name> for every field whose flag does not exist yet; the user's values go into `said`, as text. A bool field
// is a flag: --causal, or --causal=false.
void add_fields(CLI::App& app, const std::vector<FieldRef>& fields, const std::string& group, Json& said);
// The problem fields of every plan that may be chosen, and their tiling fields.
void add_problem_fields(CLI::App& app, const std::vector<KernelEntry>& entries, Settings& said);
void add_tiling_fields(CLI::App& app, KernelPlan& plan, Settings& said);

// Parses `arguments`. Returns false when help was asked for and printed. Throws Error for a bad command line, naming
// the nearest flag for an unknown one.
bool parse(CLI::App& app, std::vector<std::string> arguments);

// --seed, a whole number of 64 bits.
CLI::Option* add_seed(CLI::App& app, std::uint64_t& seed, const std::string& help);

// A number of these limits, and not NaN, which CLI11's own range takes.
CLI::Validator within(double least, double most);
CLI::Validator whole_within(int least, int most);

// The directory that --root names, which must be there; `absent` where it names none.
std::filesystem::path checkout_of(const std::string& root, const std::filesystem::path& absent);

// The value of --name=value or --name value, the last one given; `absent` when there is none. For flags that decide
// which other flags exist, such as the device of a kernel.
std::string flag_value(const std::vector<std::string>& arguments, const std::string& name,
                       const std::string& absent = "");

}  // namespace hypermla
