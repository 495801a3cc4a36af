#include "hypermla/base/error.h"

#include <algorithm>
#include <cctype>
#include <cstdio>

namespace hypermla {
namespace {

// Edits (insert, delete, replace, swap of neighbours) that turn `a` into `b`: the optimal-string-alignment form of
// Damerau-Levenshtein. '-' and '_' are one letter, since `flash-mla` and `flash_mla` name the same thing.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  auto same = [](char x, char y) { return (x == '-' ? '_' : x) == (y == '-' ? '_' : y); };
  std::vector<std::size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);  // rows i-2, i-1 and i
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before.swap(above);
    above.swap(row);
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (same(a[i - 1], b[j - 1]) ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1]);
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

bool holds(const std::string& name, std::string_view word) {
  auto same = [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); };
  return word.size() > 2 && std::search(name.begin(), name.end(), word.begin(), word.end(), same) != name.end();
}

}  // namespace

void print_error(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stderr); }

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  auto closer = [&](const std::string& x, const std::string& y) {
    return std::pair(!holds(x, word), edit_distance(word, x)) < std::pair(!holds(y, word), edit_distance(word, y));
  };
  const auto best = std::min_element(candidates.begin(), candidates.end(), closer);
  return best == candidates.end() ? std::string{} : *best;
}

}  // namespace hypermla
