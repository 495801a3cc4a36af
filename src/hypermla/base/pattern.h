// Regular expressions in ECMAScript's grammar. A source that includes <regex> takes three seconds longer to compile, so
// pattern.cpp alone does.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace hypermla {

class Pattern {
 public:
  enum class Case { as_written, any };
  explicit Pattern(const std::string& expression, Case letters = Case::as_written);

  struct Found {
    std::size_t begin;                // in the text
    std::vector<std::string> groups;  // [0] is all that was found; those that took no part are empty
    std::size_t end() const { return begin + groups[0].size(); }
  };
  std::optional<Found> match(const std::string& text) const;   // all of the text
  std::optional<Found> search(const std::string& text) const;  // the first place
  std::vector<Found> search_all(const std::string& text) const;

 private:
  struct Compiled;
  std::shared_ptr<const Compiled> compiled_;
};

}  // namespace hypermla
