// The files of the knowledge cards: what is wrong with them, a new one, the index.
#include <algorithm>
#include <cctype>
#include <map>
#include <sstream>

#include "hypermla/base/error.h"
#include "hypermla/base/fields.h"
#include "hypermla/base/files.h"
#include "hypermla/knowledge/cards.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

constexpr const char* kKnowledge = "docs/knowledge";
constexpr const char* kIndexBegin = "<!-- The index, made from the cards by `hypermla kb lint --fix`. -->\n";
constexpr const char* kIndexEnd = "<!-- The end of the index. -->\n";

// The part of a page that is Markdown: no code.
std::string without_code(const std::string& text) {
  std::istringstream lines(text);
  std::string kept;
  bool fenced = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("```", 0) == 0) fenced = !fenced;
    if (!fenced && line.rfind("```", 0) != 0 && line.rfind("    ", 0) != 0) kept += line + "\n";
  }
  return kept;
}

// The anchor that a heading gets: letters in lower case, blanks as hyphens, nothing else.
std::string anchor_of(const std::string& heading) {
  std::string anchor;
  for (const char letter : heading)
    if (std::isalnum(static_cast<unsigned char>(letter)) || letter == '_' || letter == '-' || letter == ' ')
      anchor += letter == ' ' ? '-' : char(std::tolower(static_cast<unsigned char>(letter)));
  return anchor;
}

bool has_anchor(const std::string& page, const std::string& anchor) {
  std::istringstream lines(without_code(page));
  for (std::string line; std::getline(lines, line);)
    if (line.rfind("#", 0) == 0 && anchor_of(line.substr(line.find_first_not_of('#') + 1)) == anchor) return true;
  return false;
}

// "path#anchor", seen from a directory. Empty when it leads somewhere.
std::string broken(const fs::path& from, const std::string& link) {
  const std::size_t hash = link.find('#');
  const fs::path target = from / link.substr(0, hash);
  std::error_code unreadable;
  if (!fs::exists(target, unreadable)) return fmt::format("'{}' leads nowhere", link);
  if (hash != std::string::npos && !fs::is_regular_file(target, unreadable))
    return fmt::format("'{}': that is no page", link);
  if (hash != std::string::npos && !has_anchor(read_file(target), link.substr(hash + 1)))
    return fmt::format("'{}': there is no such heading", link);
  return "";
}

std::vector<std::string> links_of(const std::string& text) {
  std::vector<std::string> links;
  for (std::size_t at = 0; (at = text.find("](", at)) != std::string::npos;) {
    const std::size_t end = text.find(')', at += 2);
    const std::string link = text.substr(at, end - at);
    if (link.find("://") == std::string::npos && link[0] != '#') links.push_back(link);
  }
  return links;
}

// Words between backquotes.
std::vector<std::string> spans_of(const std::string& text) {
  std::vector<std::string> spans;
  for (std::size_t at = 0; (at = text.find('`', at)) != std::string::npos;) {
    const std::size_t end = text.find('`', at + 1);
    if (end == std::string::npos) break;
    spans.push_back(text.substr(at + 1, end - at - 1));
    at = end + 1;
  }
  return spans;
}

struct Section {
  std::string heading, text;
};

// The title, then the sections.
std::vector<Section> sections_of(const std::string& body) {
  std::istringstream lines(body);
  std::vector<Section> sections(1);
  bool fenced = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("```", 0) == 0) fenced = !fenced;
    if (!fenced && line.rfind("# ", 0) == 0)
      sections[0].heading = line.substr(2);
    else if (!fenced && line.rfind("## ", 0) == 0)
      sections.push_back({line.substr(3), ""});
    else
      sections.back().text += line + "\n";
  }
  return sections;
}

// Nothing but blanks and comments, as in the template of a new card.
bool is_empty(std::string text) {
  for (std::size_t at; (at = text.find("<!--")) != std::string::npos;) {
    const std::size_t end = text.find("-->", at);
    text.erase(at, end == std::string::npos ? end : end + 3 - at);
  }
  return text.find_first_not_of(" \n\t") == std::string::npos;
}

bool is_kernel(const fs::path& root, const std::string& full_name) {
  std::vector<std::string> parts;
  std::istringstream stream(full_name);
  for (std::string part; std::getline(stream, part, '.');) parts.push_back(part);
  if (parts.size() != 3) return false;
  std::error_code absent;
  for (const auto& design : fs::directory_iterator(root / "kernels" / parts[0] / parts[1], absent))
    if (fs::exists(design.path() / parts[2], absent)) return true;
  return false;
}

class Lint {
 public:
  Lint(const fs::path& root, const std::set<std::string>& known)
      : root_(root), known_(known.begin(), known.end()), known_set_(known) {}

  std::vector<std::string> run() {
    const fs::path knowledge = root_ / kKnowledge;
    std::vector<Card> cards;
    for (const fs::path& place : card_directories(knowledge)) {
      std::error_code absent;
      for (const auto& entry : fs::directory_iterator(knowledge / place, absent)) {
        if (entry.path().extension() != ".md") continue;
        try {
          cards.push_back(Cards::parse(place / entry.path().filename(), read_file(entry.path())));
        } catch (const Error& error) {
          problems_.push_back(error.what());
        }
      }
    }
    std::map<std::string, const Card*> ids;
    for (const Card& card : cards)
      if (const auto [first, is_new] = ids.emplace(card.id, &card); !is_new)
        say(card, fmt::format("{} has the id {}, too", first->second->file.string(), card.id));
    for (const Card& card : cards) check(card, ids);
    if (problems_.empty()) check_index();
    std::sort(problems_.begin(), problems_.end());
    return problems_;
  }

 private:
  void say(const Card& card, const std::string& what) { problems_.push_back(card.file.string() + ": " + what); }

  void require_metric(const Card& card, const std::string& name, const char* where) {
    if (!known_set_.count(name))
      say(card, fmt::format("{} names the metric '{}', which no profile has; did you mean '{}'?", where, name,
                            nearest(name, known_)));
  }

  void check(const Card& card, const Predicate& when, const char* where) {
    for (const Condition& one : when.conditions) {
      require_metric(card, one.signal, where);
      for (const Condition& other : when.conditions)
        if (one.signal == other.signal && one.op == "<" && other.op == ">=" && one.value <= other.value)
          say(card, fmt::format("{} never holds: {} < {:g} and >= {:g}", where, one.signal, one.value, other.value));
    }
  }

  void check(const Card& card, const std::map<std::string, const Card*>& ids) {
    for (const Card::Trigger& trigger : card.triggers) {
      check(card, trigger.when, "a trigger");
      if (trigger.gain) require_metric(card, trigger.gain->signal, "a gain");
    }
    if (card.triggers.empty() && card.no_trigger.empty())
      say(card, "it has no trigger; give one, or say in 'no_trigger' why no metric shows it");
    if (!card.triggers.empty() && !card.no_trigger.empty())
      say(card, "it has a trigger; take out 'no_trigger', which says why there is none");
    for (const std::string& other : card.interactions)
      if (!ids.count(other) || other == card.id)
        say(card, fmt::format("it interacts with '{}', which is no other card", other));
    for (const Card::Refutation& one : card.refuted) {
      if (one.when) check(card, *one.when, "a refutation");
      if (!is_kernel(root_, one.kernel))
        say(card, fmt::format("it is refuted for '{}', which is no kernel; write language.layer.name", one.kernel));
      if (const std::string why = broken(root_, one.where); !why.empty()) say(card, "refuted: " + why);
    }
    const std::vector<Section> sections = sections_of(card.body);
    if (sections[0].heading != card.title)
      say(card, fmt::format("its heading is '{}' and its title '{}'; write the same", sections[0].heading, card.title));
    std::vector<std::string> headings;
    for (std::size_t i = 1; i < sections.size(); ++i) {
      headings.push_back(sections[i].heading);
      if (is_empty(sections[i].text)) say(card, fmt::format("its section '{}' is empty", sections[i].heading));
      if (sections[i].heading == "Affected metrics")
        for (const std::string& name : spans_of(sections[i].text)) require_metric(card, name, "'Affected metrics'");
      if (sections[i].heading == "Performance evidence" && card.source == "measured here" &&
          links_of(sections[i].text).empty())
        say(card, "it says 'measured here', but its 'Performance evidence' links no log, page or record");
    }
    if (headings != card_sections())
      say(card, fmt::format("its sections are not, in this order: {}", fmt::join(card_sections(), ", ")));
    for (const std::string& link : links_of(without_code(card.body)))
      if (const std::string why = broken((root_ / kKnowledge / card.file).parent_path(), link); !why.empty())
        say(card, why);
  }

  void check_index();

  const fs::path root_;
  const std::vector<std::string> known_;
  const std::set<std::string> known_set_;
  std::vector<std::string> problems_;
};

std::string render_index(const Cards& cards) {
  std::string text, group;
  for (const Card& card : cards.all()) {
    const std::string here = card.file.parent_path().string();
    if (here != group) text += fmt::format("{}In `{}`:\n\n", text.empty() ? "" : "\n", here);
    group = here;
    const std::string link = fmt::format("- [{}]({}):", card.id, card.file.string());
    text += link + (link.size() + 1 + card.title.size() > 120 ? "\n  " : " ") + card.title + "\n";
  }
  return text;
}

// README.md with the index that the cards have now.
std::string with_index(const fs::path& root) {
  const fs::path readme = root / kKnowledge / "README.md";
  const std::string text = read_file(readme);
  const std::size_t begin = text.find(kIndexBegin), end = text.find(kIndexEnd);
  if (begin == std::string::npos || end == std::string::npos || end < begin)
    fail("{} has lost the two comments between which its index stands; restore them from the repository",
         readme.string());
  return text.substr(0, begin) + kIndexBegin + "\n" + render_index(Cards::load(root / kKnowledge)) + "\n" +
         text.substr(end);
}

void Lint::check_index() try {
  if (with_index(root_) != read_file(root_ / kKnowledge / "README.md"))
    problems_.push_back("README.md: its index is not that of the cards; `hypermla kb lint --fix` writes it");
} catch (const Error& error) {
  problems_.push_back(error.what());
}

// By whoever holds the lock on the cards.
void write_index(const fs::path& root) {
  sweep_scratch(root / kKnowledge);
  write_file_atomic(root / kKnowledge / "README.md", with_index(root));
}

std::string new_card(const Card& card) {
  const std::map<std::string, const char*> hints = {
      {"When to apply", "Which kernels, and what their profiles show."},
      {"Mechanism", "Why it works, in the hardware's terms."},
      {"Affected metrics", "Names of metrics between backquotes, and where they go."},
      {"Implementation", "What to write; a few lines of code."},
      {"Performance evidence", "Measured here, with a link to the log or record, or external with its source."},
      {"Generalization", "What holds on other devices and kernels."},
      {"Pitfalls", "How it fails."},
      {"Interactions", "With which cards, and how."}};
  Json json = {
      {"id", card.id},    {"title", card.title},       {"advice", card.title + "."}, {"scope", "any kernel"},
      {"control", "any"}, {"source", "measured here"}, {"triggers", Json::array()},  {"interactions", Json::array()}};
  std::string text = "---\n" + json.dump(2) + "\n---\n# " + card.title + "\n";
  for (const std::string& section : card_sections())
    text += fmt::format("\n## {}\n\n<!-- {} -->\n", section, hints.at(section));
  return text;
}

}  // namespace

std::vector<std::string> lint_cards(const fs::path& root, const std::set<std::string>& known) {
  return Lint(root, known).run();
}

void write_card_index(const fs::path& root) {
  const FileDescriptor lock = lock_directory(root / kKnowledge);  // a card that is being added is not left out
  write_index(root);
}

fs::path add_card(const fs::path& root, const std::string& place, const std::string& title) {
  const fs::path directory = fs::path(place).parent_path();
  const std::string name = fs::path(place).filename();
  const fs::path knowledge = root / kKnowledge;
  const std::vector<fs::path> places = card_directories(knowledge);
  if (std::find(places.begin(), places.end(), directory) == places.end()) {
    std::vector<std::string> names;
    for (const fs::path& one : places) names.push_back(one.string());
    fail("'{}' is no place for a card; write <directory>/<name>, where the directory is one of: {}", place,
         fmt::join(names, ", "));
  }
  const auto plain = [](unsigned char letter) { return std::islower(letter) || std::isdigit(letter) || letter == '-'; };
  if (name.empty() || !std::all_of(name.begin(), name.end(), plain))
    fail("'{}' is no name of a card; use lower case letters, digits and hyphens", name);
  if (title.find_first_not_of(" \t") == std::string::npos || title.find('\n') != std::string::npos)
    fail("a title is one line; give one by --title");
  Card card;
  card.file = directory / (name + ".md");
  card.title = title;
  const fs::path path = knowledge / card.file;
  const FileDescriptor lock = lock_directory(knowledge);  // two cards at once have two ids
  if (fs::exists(path)) fail("{} is there already; edit it, or choose another name", path.string());

  const bool anti = directory.filename() == "anti-patterns";
  const std::string language = *directory.begin() == "languages" ? std::next(directory.begin())->string() + "-" : "";
  const std::string prefix = language + (anti ? "A" : "O");
  int last = 0;
  const Cards cards = Cards::load(knowledge);
  for (const Card& other : cards.all()) {
    if (other.file.stem() == name) fail("{} has that name already; choose another", other.file.string());
    if (other.file.parent_path() == directory) last = std::max(last, std::atoi(&other.id[prefix.size()]));
  }
  card.id = prefix + std::to_string(last + 1);
  with_index(root);  // fails before anything is written
  make_directories(path.parent_path());
  write_file_atomic(path, new_card(card));
  try {
    write_index(root);
  } catch (...) {
    fs::remove(path);
    throw;
  }
  return path;
}

}  // namespace hypermla
