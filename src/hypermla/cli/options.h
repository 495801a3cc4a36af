// Flags made from field lists, and the words for what is wrong with a command line.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "hypermla/base/fields.h"

namespace hypermla {

// Adds --<name> for every field; what the user gives goes through FieldRef::parse, so errors name the field. A bool field
// is a flag: --causal, or --causal=false. The fields must outlive the parse.
void add_fields(CLI::App& app, const std::vector<FieldRef>& fields, const std::string& group);

// Parses `arguments`. Returns false when help was asked for and printed. Throws Error for a bad command line, naming the
// nearest flag for an unknown one.
bool parse(CLI::App& app, std::vector<std::string> arguments);

// The value of --name=value or --name value, the last one given; `absent` when there is none. For flags that decide which
// flags there are, such as the device of a kernel.
std::string flag_value(const std::vector<std::string>& arguments, const std::string& name,
                       const std::string& absent = "");

}  // namespace hypermla
