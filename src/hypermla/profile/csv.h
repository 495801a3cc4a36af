// Files of comma-separated values, as profilers write them (RFC 4180).
#pragma once

#include <string>
#include <vector>

namespace hypermla {

// A field, quoted where it must be.
std::string csv_field(const std::string& text);
// The rows of a file, quotes resolved; a row may span lines.
std::vector<std::vector<std::string>> parse_csv(const std::string& text);

}  // namespace hypermla
