#include "hypermla/base/pattern.h"

#include <regex>

namespace hypermla {

struct Pattern::Compiled {
  std::regex regex;
};

namespace {

Pattern::Found found(const std::smatch& match) { return {std::size_t(match.position()), {match.begin(), match.end()}}; }

}  // namespace

Pattern::Pattern(const std::string& expression, Case letters)
    : compiled_(new Compiled{std::regex(
          expression, letters == Case::any ? std::regex::ECMAScript | std::regex::icase : std::regex::ECMAScript)}) {}

std::optional<Pattern::Found> Pattern::match(const std::string& text) const {
  std::smatch match;
  if (!std::regex_match(text, match, compiled_->regex)) return std::nullopt;
  return found(match);
}

std::optional<Pattern::Found> Pattern::search(const std::string& text) const {
  std::smatch match;
  if (!std::regex_search(text, match, compiled_->regex)) return std::nullopt;
  return found(match);
}

std::vector<Pattern::Found> Pattern::search_all(const std::string& text) const {
  std::vector<Found> all;
  for (std::sregex_iterator at(text.begin(), text.end(), compiled_->regex), end; at != end; ++at)
    all.push_back(found(*at));
  return all;
}

}  // namespace hypermla
