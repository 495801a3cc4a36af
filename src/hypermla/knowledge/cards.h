// Knowledge cards: what makes kernels faster or slower, one page each below docs/knowledge, for people, agents and the
// report of a profile. A page begins with a front matter in JSON (which is YAML, too), then has eight sections:
//
//   ---
//   {
//     "id": "O6",                                  O: optimisation, A: anti-pattern; of one language: "cute-O1"
//     "title": "Share loads in a cluster",
//     "advice": "one sentence, which reports show",
//     "scope": "which kernels, on which GPUs",
//     "control": "any",                            any, block or explicit: what the language must offer
//     "source": "measured here",                   or "external"
//     "triggers": [{"when": "memory_pct >= 60", "gain": "share memory_pct 0.2"}],      see predicate.h
//     "no_trigger": "one sentence",                why no metric shows it; only where there are no triggers
//     "interactions": ["O4"],
//     "refuted": [{"for": "cute.mla.flash_mla", "figure": "b4: 24.1 us became 22.4 without", "where": "docs/log/..."}]
//   }
//   ---
//   # Share loads in a cluster
//   ## When to apply ... ## Interactions
//
// "refuted" names kernels (language.layer.design[_vN]) on which the idea was measured and lost, with "when", a
// predicate, if that holds for some problems only. It may be absent, and so may the "gain" of a trigger.
#pragma once

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "hypermla/knowledge/predicate.h"

namespace hypermla {

struct Card {
  struct Trigger {
    Predicate when;
    std::optional<Gain> gain;  // absent: the card explains, and promises no time
  };
  struct Refutation {
    std::string kernel, figure, where;
    std::optional<Predicate> when;  // only where this holds; absent: always
  };

  std::filesystem::path file;  // below docs/knowledge: optimizations/cga.md
  std::string language;        // of a card below languages/: "cute"; empty: of all
  std::string id, title, advice, scope, control, source;
  std::vector<Trigger> triggers;  // any of them
  std::string no_trigger;         // why there are none
  std::vector<std::string> interactions;
  std::vector<Refutation> refuted;
  std::string body;  // behind the front matter

  // Null unless the idea was refuted for one of these kernels, in a stage with these signals.
  const Refutation* refutation(const std::vector<std::string>& kernels, const Signals& signals) const;
  std::string when() const;  // all triggers as one text; empty without any
};

// A card that a stage fires.
struct CardMatch {
  const Card* card = nullptr;
  std::string trigger;  // with the values that fired: "waves = 0.97 < 1"
  double gain_percent = 0;
  const Card::Refutation* refuted = nullptr;
};

class Cards {
 public:
  // All cards below `directory` (docs/knowledge), by id. Throws Error naming the first that is not as described above.
  static Cards load(const std::filesystem::path& directory);
  static Card parse(const std::filesystem::path& file, const std::string& text);

  const std::vector<Card>& all() const { return cards_; }
  // By id or by the name of its file, without ".md". Throws Error naming the nearest.
  const Card& find(const std::string& name) const;
  // What a stage with these signals fires, for kernels of these full names ("cute.mla.flash_mla"): cards of all
  // languages and of theirs. Promising ones first, by their gain; refuted ones behind them. Where all gains that the
  // triggers state are below a percent, a card is not fired.
  std::vector<CardMatch> match(const Signals& signals, const std::vector<std::string>& kernels) const;

 private:
  std::vector<Card> cards_;
};

// The headings of a card, in order.
const std::vector<std::string>& card_sections();
// Where cards may be, below docs/knowledge: optimizations, anti-patterns, languages/cute/optimizations, ...
std::vector<std::filesystem::path> card_directories(const std::filesystem::path& knowledge);

// What is wrong with the cards of <root>/docs/knowledge: front matter, sections, links, interactions, places that
// `refuted` names, metrics that are not in `known`, and the index in README.md. Sentences that begin with the file.
std::vector<std::string> lint_cards(const std::filesystem::path& root, const std::set<std::string>& known);

// Writes a card with empty sections and a new id, and the index; returns its path. `place` is <directory>/<name>, as in
// card_directories(). Throws Error where a card of that name is there already.
std::filesystem::path add_card(const std::filesystem::path& root, const std::string& place, const std::string& title);

// Writes the index of README.md anew from the cards.
void write_card_index(const std::filesystem::path& root);

}  // namespace hypermla
