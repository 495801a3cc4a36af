// The text that a kernel is compiled from, for the keys that depend on it.
#pragma once

#include <compare>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace hypermla {

struct SourceFile {
  std::string name;  // its path below the nearest of the include paths, so that a moved checkout keeps its keys
  std::string text;
  auto operator<=>(const SourceFile&) const = default;
};
// `header` and everything that it includes, as found in `paths` or beside the includer, in the order of their names.
// What is not found belongs to the compiler and is left out. Throws Error when `header` cannot be read.
std::vector<SourceFile> source_closure(const std::filesystem::path& header,
                                       const std::vector<std::filesystem::path>& paths);

// C++ or CUDA source without comments, and with white space only where it separates: two texts for which this is the
// same compile to the same code, but for __LINE__. String and character literals and the lines of the preprocessor are
// kept.
std::string without_comments(std::string_view source);

}  // namespace hypermla
