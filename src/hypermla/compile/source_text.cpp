#include "hypermla/compile/source_text.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <map>
#include <sstream>

#include "hypermla/base/files.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

// The file that a line includes: its name and whether it is quoted; an empty name for any other line.
std::pair<std::string, bool> included_name(const std::string& line) {
  const std::size_t hash = line.find_first_not_of(" \t");
  if (hash == std::string::npos || line[hash] != '#') return {};
  const std::size_t word = line.find_first_not_of(" \t", hash + 1);
  if (word == std::string::npos || line.compare(word, 7, "include") != 0) return {};
  const std::size_t open = line.find_first_of("\"<", word);
  const std::size_t close = open == std::string::npos ? open : line.find_first_of("\">", open + 1);
  if (close == std::string::npos) return {};
  return {line.substr(open + 1, close - open - 1), line[open] == '"'};
}

void collect(const fs::path& file, const std::vector<fs::path>& paths, std::map<std::string, std::string>& texts) {
  const fs::path normal = file.lexically_normal();
  if (texts.count(normal.string())) return;
  const std::string& text = texts[normal.string()] = read_file(normal);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto [name, quoted] = included_name(line);
    if (name.empty()) continue;
    std::vector<fs::path> directories = paths;
    if (quoted) directories.insert(directories.begin(), normal.parent_path());
    for (const fs::path& directory : directories)
      if (std::error_code unreadable; fs::is_regular_file(directory / name, unreadable)) {  // as compilers look for it
        collect(directory / name, paths, texts);
        break;
      }
  }
}

// Whether two characters side by side may be another token than with space between them.
bool may_join(char a, char b) {
  auto is_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("_.\"'", c); };
  auto is_operator = [](char c) { return std::strchr("+-*/%<>=&|^!?:#", c) != nullptr; };
  return (is_word(a) && is_word(b)) || (is_operator(a) && is_operator(b));
}

// Behind the literal, string or character, plain or raw, whose quote is at `at`.
std::size_t end_of_literal(std::string_view source, std::size_t at) {
  const char quote = source[at];
  if (quote == '"' && at > 0 && source[at - 1] == 'R') {
    const std::size_t open = source.find('(', at);
    if (open == std::string_view::npos) return source.size();
    const std::string close = ")" + std::string(source.substr(at + 1, open - at - 1)) + "\"";
    const std::size_t end = source.find(close, open);
    return end == std::string_view::npos ? source.size() : end + close.size();
  }
  for (++at; at < source.size() && source[at] != quote && source[at] != '\n'; ++at) at += source[at] == '\\';
  return std::min(at + 1, source.size());
}

}  // namespace

std::vector<SourceFile> source_closure(const fs::path& header, const std::vector<fs::path>& paths) {
  std::map<std::string, std::string> texts;
  collect(header, paths, texts);
  std::vector<SourceFile> files;
  for (auto& [path, text] : texts) {
    std::string shortest = path;
    for (const fs::path& directory : paths) {
      const std::string relative = fs::path(path).lexically_relative(directory.lexically_normal()).string();
      if (!relative.empty() && relative.rfind("..", 0) != 0 && relative.size() < shortest.size()) shortest = relative;
    }
    files.push_back({shortest, std::move(text)});
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::string without_comments(std::string_view source) {
  std::string kept;
  bool begins_line = true, directive = false, space = false;
  auto keep = [&](std::string_view text) {
    const char before = kept.empty() ? '\n' : kept.back();
    // In a directive any space may matter: `#define F (x)`.
    if (space && before != '\n' && (directive || may_join(before, text[0]))) kept += ' ';
    begins_line = space = false;
    kept += text;
  };
  for (std::size_t at = 0; at < source.size();) {
    const char c = source[at];
    const std::string_view two = source.substr(at, 2);
    if (two == "//") {
      while (at < source.size() && (source[at] != '\n' || source[at - 1] == '\\')) ++at;  // a backslash continues it
      space = true;
    } else if (two == "/*") {
      const std::size_t end = source.find("*/", at + 2);
      at = end == std::string_view::npos ? source.size() : end + 2;
      space = true;
    } else if (two == "\\\n") {
      at += 2;
      space = true;
    } else if (c == '\n') {
      if (directive) kept += '\n';
      directive = false;
      begins_line = space = true;
      ++at;
    } else if (std::isspace(static_cast<unsigned char>(c))) {
      space = true;
      ++at;
    } else if (c == '"' || (c == '\'' && !(at > 0 && std::isdigit(static_cast<unsigned char>(source[at - 1]))))) {
      const std::size_t end = end_of_literal(source, at);
      keep(source.substr(at, end - at));
      at = end;
    } else {
      if (c == '#' && begins_line) {
        directive = true;
        if (!kept.empty() && kept.back() != '\n') kept += '\n';
      }
      keep(source.substr(at, 1));
      ++at;
    }
  }
  return kept;
}

}  // namespace hypermla
