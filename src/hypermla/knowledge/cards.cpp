#include "hypermla/knowledge/cards.h"

#include <algorithm>

#include "hypermla/base/error.h"
#include "hypermla/base/fields.h"
#include "hypermla/base/files.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

const std::vector<std::string>& front_matter_keys() {
  static const std::vector<std::string> keys = {"id",     "title",    "advice",     "scope",        "control",
                                                "source", "triggers", "no_trigger", "interactions", "refuted"};
  return keys;
}

void require_keys(const Json& json, const std::vector<std::string>& keys, const char* where) {
  for (const auto& [key, value] : json.items())
    if (std::find(keys.begin(), keys.end(), key) == keys.end())
      fail("{} has an unknown key '{}'; did you mean '{}'?", where, key, nearest(key, keys));
}

std::string one_of(const std::string& key, const std::string& value, const std::vector<std::string>& allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) == allowed.end())
    fail("its {} is '{}'; choose one of: {}", key, value, fmt::join(allowed, ", "));
  return value;
}

std::string sentence(const Json& json, const char* key) {
  const std::string text = json.at(key);
  if (text.empty()) fail("its '{}' is empty", key);
  return text;
}

// "O6", "A8", "cute-O1": by where the card is.
void require_id(const Card& card) {
  const bool anti = card.file.parent_path().filename() == "anti-patterns";
  const std::string prefix = (card.language.empty() ? "" : card.language + "-") + (anti ? "A" : "O");
  const std::string number = card.id.rfind(prefix, 0) == 0 ? card.id.substr(prefix.size()) : "";
  const auto digit = [](unsigned char letter) { return std::isdigit(letter) != 0; };
  if (number.empty() || !std::all_of(number.begin(), number.end(), digit))
    fail("its id is '{}'; there it is {} and a number", card.id, prefix);
}

// Cards in the order of the index: shared before languages, optimisations before anti-patterns, then by number.
bool before(const Card& a, const Card& b) {
  const auto key = [](const Card& card) {
    const auto number = card.id.find_last_not_of("0123456789") + 1;
    return std::tuple(card.language, card.file.parent_path().filename() == "anti-patterns", card.id.size() - number,
                      card.id);
  };
  return key(a) < key(b);
}

}  // namespace

const std::vector<std::string>& card_sections() {
  static const std::vector<std::string> sections = {
      "When to apply",        "Mechanism",      "Affected metrics", "Implementation",
      "Performance evidence", "Generalization", "Pitfalls",         "Interactions"};
  return sections;
}

std::vector<fs::path> card_directories(const fs::path& knowledge) {
  std::vector<fs::path> directories = {"optimizations", "anti-patterns"};
  std::error_code absent;
  std::set<fs::path> languages;
  for (const auto& entry : fs::directory_iterator(knowledge / "languages", absent))
    if (entry.is_directory()) languages.insert(entry.path().filename());
  for (const fs::path& language : languages)
    for (const char* kind : {"optimizations", "anti-patterns"}) directories.push_back("languages" / language / kind);
  return directories;
}

const Card::Refutation* Card::refutation(const std::vector<std::string>& kernels, const Signals& signals) const {
  const auto found = std::find_if(refuted.begin(), refuted.end(), [&](const Refutation& one) {
    return std::find(kernels.begin(), kernels.end(), one.kernel) != kernels.end() &&
           (!one.when || one.when->holds(signals));
  });
  return found == refuted.end() ? nullptr : &*found;
}

std::string Card::when() const {
  std::string text;
  for (const Trigger& trigger : triggers) {
    if (!text.empty()) text += "; or ";
    std::string all;
    for (const Condition& one : trigger.when.conditions)
      all += fmt::format("{}{} {} {:g}", all.empty() ? "" : " and ", one.signal, one.op, one.value);
    text += all;
  }
  return text;
}

Card Cards::parse(const fs::path& file, const std::string& text) try {
  const std::string_view fence = "---\n";
  const std::size_t end = text.rfind(fence, 0) == 0 ? text.find("\n---\n", fence.size() - 1) : std::string::npos;
  if (end == std::string::npos) fail("it does not begin with a front matter between two lines of ---");
  const Json json = Json::parse(text.substr(fence.size(), end - fence.size() + 1), nullptr, false);
  if (!json.is_object()) fail("its front matter is no JSON object");
  require_keys(json, front_matter_keys(), "its front matter");
  Card card;
  card.file = file;
  if (*file.begin() == "languages") card.language = std::next(file.begin())->string();
  card.body = text.substr(end + fence.size() + 1);
  card.id = sentence(json, "id");
  require_id(card);
  card.title = sentence(json, "title");
  card.advice = sentence(json, "advice");
  card.scope = sentence(json, "scope");
  card.control = one_of("control", json.at("control"), {"any", "block", "explicit"});
  card.source = one_of("source", json.at("source"), {"measured here", "external"});
  for (const Json& trigger : json.at("triggers")) {
    card.triggers.push_back({Predicate::parse(trigger.at("when")),
                             trigger.contains("gain") ? std::optional(Gain::parse(trigger["gain"])) : std::nullopt});
    require_keys(trigger, {"when", "gain"}, "a trigger");
  }
  if (json.contains("no_trigger")) card.no_trigger = sentence(json, "no_trigger");
  json.at("interactions").get_to(card.interactions);
  for (const Json& one : json.value("refuted", Json::array())) {
    card.refuted.push_back({sentence(one, "for"), sentence(one, "figure"), sentence(one, "where"),
                            one.contains("when") ? std::optional(Predicate::parse(one["when"])) : std::nullopt});
    require_keys(one, {"for", "figure", "where", "when"}, "a refutation");
  }
  return card;
} catch (const Json::exception&) {
  fail("{}: a key of its front matter is missing or of another type; src/hypermla/knowledge/cards.h describes them",
       file.string());
} catch (const Error& error) {
  fail("{}: {}", file.string(), error.what());
}

Cards Cards::load(const fs::path& directory) {
  Cards cards;
  if (!fs::is_directory(directory))
    fail("the knowledge cards are not at {}; restore them from the repository", directory.string());
  for (const fs::path& place : card_directories(directory)) {
    std::error_code absent;
    for (const auto& entry : fs::directory_iterator(directory / place, absent)) {
      if (entry.path().extension() != ".md") continue;
      const std::string text = read_file(entry.path());
      try {
        cards.cards_.push_back(parse(place / entry.path().filename(), text));
      } catch (const Error& error) {
        fail("{}/{}; mend it, or restore it from the repository", directory.string(), error.what());
      }
    }
  }
  std::sort(cards.cards_.begin(), cards.cards_.end(), before);
  return cards;
}

const Card& Cards::find(const std::string& name) const {
  std::vector<std::string> names;
  for (const Card& card : cards_) {
    if (card.id == name || card.file.stem() == name) return card;
    names.insert(names.end(), {card.id, card.file.stem().string()});
  }
  fail("there is no card '{}'; did you mean {}? `hypermla kb list` lists all", name, nearest(name, names));
}

std::vector<CardMatch> Cards::match(const Signals& signals, const std::vector<std::string>& kernels) const {
  std::vector<CardMatch> found;
  for (const Card& card : cards_) {
    if (!card.language.empty() && (kernels.empty() || kernels.front().rfind(card.language + ".", 0) != 0)) continue;
    CardMatch best{&card, "", 0, card.refutation(kernels, signals)};
    for (const Card::Trigger& trigger : card.triggers) {
      if (!trigger.when.holds(signals)) continue;
      const double percent = trigger.gain ? trigger.gain->percent(signals) : 0;
      if (trigger.gain ? percent < 1 || percent <= best.gain_percent : !best.trigger.empty()) continue;
      best.gain_percent = percent;
      best.trigger = trigger.when.describe(signals);
    }
    if (!best.trigger.empty()) found.push_back(best);
  }
  std::stable_sort(found.begin(), found.end(), [](const CardMatch& a, const CardMatch& b) {
    return std::pair(a.refuted != nullptr, -a.gain_percent) < std::pair(b.refuted != nullptr, -b.gain_percent);
  });
  return found;
}

}  // namespace hypermla
