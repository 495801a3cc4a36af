// How the library throws its one exception type, hypermla/error.h.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

#include "hypermla/error.h"

namespace hypermla {

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

// Writes to the standard error. What cannot be written there, as on a full disk, is lost, and nothing else.
void print_error(const std::string& text);

// The candidate that differs from `word` by the fewest edits, for "did you mean"; one that holds the whole word, in
// upper or lower case, comes first ("H200": "NVIDIA H200"). Empty when `candidates` is.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace hypermla
