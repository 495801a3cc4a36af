// JSON of files that may be damaged in any way.
#pragma once

#include <filesystem>

#include "hypermla/base/fields.h"

namespace hypermla {

// What a file holds; discarded (Json::is_discarded) when that is no JSON, or nested deeper than any file of this
// program: values within values are written recursively, and would overflow the stack. Throws Error as read_file().
Json read_json(const std::filesystem::path& path);

}  // namespace hypermla
