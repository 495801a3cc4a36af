// Knowledge cards: their form, what a profile fires, and what lint finds.
#include "hypermla/knowledge/cards.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <optional>

#include "hypermla/base/fields.h"
#include "hypermla/base/files.h"
#include "hypermla/profile/profilers.h"
#include "hypermla/profile/signals.h"
#include "support.h"

namespace hypermla::cards_test {
namespace {
using testing_support::checkout;
using testing_support::contains;
using testing_support::error_of;
using testing_support::TempDir;

TEST(Predicate, HoldsWhereAllConditionsDo) {
  const Predicate both = Predicate::parse("waves < 1 and dram_pct >= 70");
  EXPECT_TRUE(both.holds({{"waves", 0.5}, {"dram_pct", 70}}));
  EXPECT_FALSE(both.holds({{"waves", 1}, {"dram_pct", 70}}));
  EXPECT_FALSE(both.holds({{"waves", 0.5}, {"dram_pct", 69.9}}));
  EXPECT_FALSE(both.holds({{"waves", 0.5}})) << "a missing signal";
  EXPECT_EQ(both.describe({{"waves", 0.5}, {"dram_pct", 70}}), "waves = 0.5 < 1, dram_pct = 70 >= 70");
  for (const char* wrong : {"", "waves", "waves <", "waves < one", "waves > 1", "waves < 1 or b < 1", "waves < 1 and",
                            "waves < 1 2", "waves < 1 and b", "waves < inf"})
    EXPECT_NE(error_of([&] { Predicate::parse(wrong); }), "") << wrong;
}

TEST(Gain, StaysBelowTheRoofline) {
  const Signals signals = {{"a", 40}, {"b", 4}, {"c", 60}};
  auto gains = [](const Signals& with) {
    return std::vector<double>{Gain::parse("toward a 50").percent(with), Gain::parse("excess b 1").percent(with),
                               Gain::parse("share c 0.5").percent(with), Gain::parse("share d 0.5").percent(with)};
  };
  EXPECT_EQ(gains(signals), (std::vector<double>{20, 75, 30, 0}));
  Signals near = signals;
  near["roofline_fraction"] = 0.75;
  EXPECT_EQ(gains(near), (std::vector<double>{20, 25, 25, 0}));
  near["roofline_fraction"] = 1.2;  // faster than the model: nothing to promise
  EXPECT_EQ(gains(near), (std::vector<double>{0, 0, 0, 0}));
  for (const char* wrong :
       {"", "magic a 1", "toward a", "toward a b", "toward a 1 2", "toward a 0", "excess a -1", "share a 1.1"})
    EXPECT_NE(error_of([&] { Gain::parse(wrong); }), "") << wrong;
}

std::string card_text(const std::string& id, const std::string& title, const Json& changes = Json::object()) {
  Json front = {{"id", id},
                {"title", title},
                {"advice", "Do it."},
                {"scope", "any kernel"},
                {"control", "any"},
                {"source", "external"},
                {"triggers", {{{"when", "waves < 1"}, {"gain", "toward waves 1"}}}},
                {"interactions", Json::array()}};
  front.update(changes);
  std::string text = "---\n" + front.dump(2) + "\n---\n# " + title + "\n";
  for (const std::string& section : card_sections()) text += "\n## " + section + "\n\nText.\n";
  return text;
}

// A checkout of two cards, an index and a kernel.
struct Checkout {
  Checkout() {
    dir.write("docs/knowledge/README.md",
              "# Cards\n\n<!-- The index, made from the cards by `hypermla kb lint --fix`. -->\n"
              "<!-- The end of the index. -->\n");
    dir.write("docs/log/a.txt", "# A log\n\n## Steps, all\n");
    dir.write("kernels/cute/mla/fast/fast_v1/fast_v1.cpp", "");
    write("optimizations/one.md", card_text("O1", "One"));
    write("languages/cute/anti-patterns/two.md", card_text("cute-A1", "Two", {{"interactions", {"O1"}}}));
    write_card_index(dir.path());
  }
  void write(const std::string& name, const std::string& text) { dir.write("docs/knowledge/" + name, text); }
  std::vector<std::string> lint() const { return lint_cards(dir.path(), {"waves", "dram_pct"}); }
  Cards cards() const { return Cards::load(dir.path() / "docs/knowledge"); }
  TempDir dir;
};

TEST(Cards, OfTheRepositoryAreRight) {
  const std::vector<std::string> problems = lint_cards(checkout(), signal_names());
  EXPECT_TRUE(problems.empty()) << fmt::format("{}", fmt::join(problems, "\n"));
  std::set<std::string> ids;
  const Cards cards = Cards::load(checkout() / "docs/knowledge");
  for (const Card& card : cards.all()) ids.insert(card.id);
  for (int number = 1; number <= 11; ++number) EXPECT_EQ(ids.count(fmt::format("O{}", number)), 1u) << number;
  for (int number = 1; number <= 8; ++number) EXPECT_EQ(ids.count(fmt::format("A{}", number)), 1u) << number;
}

TEST(Cards, AreFiredByTheirTriggersAndLanguage) {
  Checkout made;
  made.write("optimizations/three.md",
             card_text("O3", "Three",
                       {{"triggers", {{{"when", "dram_pct >= 50"}, {"gain", "share dram_pct 0.5"}}}},
                        {"refuted",
                         {{{"for", "cute.mla.fast_v1"},
                           {"figure", "9 us became 10"},
                           {"where", "docs/log/a.txt"},
                           {"when", "dram_pct >= 60"}}}}}));
  made.write("optimizations/four.md", card_text("O4", "Four", {{"triggers", {{{"when", "waves < 1"}}}}}));
  const Cards cards = made.cards();
  auto fired = [&](double waves, double dram, const char* kernel) {
    std::vector<std::string> ids;
    for (const CardMatch& match : cards.match({{"waves", waves}, {"dram_pct", dram}}, {kernel}))
      ids.push_back(match.card->id + (match.refuted ? "!" : ""));
    return ids;
  };
  using Ids = std::vector<std::string>;
  EXPECT_EQ(fired(0.5, 10, "cute.mla.fast"), (Ids{"O1", "cute-A1", "O4"})) << "without an estimate comes last";
  EXPECT_EQ(fired(0.5, 10, "cutile.mla.fast"), (Ids{"O1", "O4"})) << "of another language";
  EXPECT_EQ(fired(2, 80, "cute.mla.fast"), (Ids{"O3"}));
  EXPECT_EQ(fired(0.5, 80, "cute.mla.fast_v1"), (Ids{"O1", "cute-A1", "O4", "O3!"})) << "refuted ones are last";
  EXPECT_EQ(fired(2, 55, "cute.mla.fast_v1"), (Ids{"O3"})) << "it was refuted from 60 % on only";
  EXPECT_EQ(cards.match({{"waves", 0.5}}, {"cutile.mla.fast"})[0].trigger, "waves = 0.5 < 1");
  EXPECT_EQ(cards.match({{"waves", 0.5}}, {"cutile.mla.fast"})[0].gain_percent, 50);
  EXPECT_EQ(cards.find("three").id, "O3");
  EXPECT_EQ(cards.find("O3").title, "Three");
  EXPECT_TRUE(contains(error_of([&] { cards.find("thre"); }), "did you mean three?"));
}

TEST(Cards, ThatDoNotParseAreFoundBeforeAProfile) {
  const TempDir directory;
  std::filesystem::create_directories(directory.path() / "optimizations");
  write_file_atomic(directory.path() / "optimizations/cga.md", "---\n{{\n---\n");
  ProfileTools tools;
  tools.cards = directory.path();
  const std::string said = error_of([&] { require_knowledge(tools); });
  EXPECT_EQ(said, (directory.path() / "optimizations/cga.md").string() +
                      ": its front matter is no JSON object; mend it, or restore it from the repository");
  tools.cards = checkout() / "docs/knowledge";
  EXPECT_EQ(error_of([&] { require_knowledge(tools); }), "");
}

TEST(Cards, LintFindsWhatIsWrong) {
  EXPECT_EQ(Checkout().lint(), (std::vector<std::string>{}));
  auto finds = [](const Json& changes, const std::string& expected) {
    Checkout made;
    made.write("optimizations/bad.md", card_text("O9", "Bad", changes));
    try {
      write_card_index(made.dir.path());
    } catch (const Error&) {  // a card that cannot be read
    }
    const std::vector<std::string> problems = made.lint();
    const bool found =
        problems.size() == 1 && contains(problems[0], "optimizations/bad.md: ") && contains(problems[0], expected);
    EXPECT_TRUE(found) << expected << ": " << fmt::format("{}", fmt::join(problems, "\n"));
  };
  finds({{"triggers", {{{"when", "waive < 1"}, {"gain", "toward waves 1"}}}}},
        "'waive', which no profile has; did you mean 'waves'?");
  finds({{"triggers", {{{"when", "waves < 1"}, {"gain", "toward wave 1"}}}}}, "a gain names the metric 'wave'");
  finds({{"triggers", {{{"when", "waves = 1"}, {"gain", "toward waves 1"}}}}}, "'waves = 1' is no predicate");
  finds({{"triggers", Json::array()}}, "it has no trigger; give one, or say in 'no_trigger' why no metric shows it");
  finds({{"no_trigger", "None."}}, "it has a trigger; take out 'no_trigger'");
  finds({{"triggers", Json::array()}, {"no_trigger", ""}}, "its 'no_trigger' is empty");
  finds({{"triggers", {{{"when", "waves < 1 and waves >= 1"}}}}}, "a trigger never holds: waves < 1 and >= 1");
  finds({{"triggers", {{{"when", "waves < 1"}, {"gian", "toward waves 1"}}}}}, "a trigger has an unknown key 'gian'");
  finds({{"refuted", {{{"for", "cute.mla.fast_v1"}, {"figure", "1 us"}, {"where", "docs/log/a.txt"}, {"wen", "x"}}}}},
        "a refutation has an unknown key 'wen'; did you mean 'when'?");
  finds({{"triggers", 3}}, "a key of its front matter is missing or of another type");
  finds({{"colour", "red"}}, "unknown key 'colour'");
  finds({{"id", "A9"}}, "its id is 'A9'; there it is O and a number");
  finds({{"id", "O1"}}, "has the id O1, too");
  finds({{"source", "hearsay"}}, "choose one of: measured here, external");
  finds({{"source", "measured here"}}, "links no log, page or record");
  finds({{"interactions", {"O7"}}}, "it interacts with 'O7', which is no other card");
  auto refuted = [](const char* kernel, const char* where) {
    return Json{{"refuted", {{{"for", kernel}, {"figure", "1 us"}, {"where", where}}}}};
  };
  finds(refuted("cute.mla.slow", "docs/log/a.txt#steps-all"), "it is refuted for 'cute.mla.slow', which is no kernel");
  finds(refuted("cute.mla.fast_v1", "docs/log/b.txt"), "'docs/log/b.txt' leads nowhere");
  finds(refuted("cute.mla.fast_v1", "docs/log/a.txt#step"), "there is no such heading");
  finds({{"title", "Worse"}}, "its heading is 'Bad' and its title 'Worse'");
}

TEST(Cards, LintReadsThePage) {
  auto finds = [](const std::function<void(std::string&)>& spoil, const std::string& expected) {
    Checkout made;
    std::string text = card_text("O9", "Bad");
    spoil(text);
    made.write("optimizations/bad.md", text);
    try {
      write_card_index(made.dir.path());
    } catch (const Error&) {
    }
    const std::vector<std::string> problems = made.lint();
    const bool found = problems.size() == 1 && contains(problems[0], expected);
    EXPECT_TRUE(found) << expected << ": " << fmt::format("{}", fmt::join(problems, "\n"));
  };
  auto replace = [](const std::string& from, const std::string& to) {
    return [=](std::string& text) { text.replace(text.find(from), from.size(), to); };
  };
  finds(replace("## Pitfalls", "## Traps"), "its sections are not, in this order");
  finds(replace("## Mechanism\n\nText.", "## Mechanism\n\n<!-- Why it works. -->"), "its section 'Mechanism' is empty");
  finds(replace("## Mechanism\n\nText.", "## Mechanism\n\n[a](../gone.md)"), "'../gone.md' leads nowhere");
  finds(replace("## Mechanism\n\nText.", "## Mechanism\n\n[a](../#foo)"), "'../#foo': that is no page");
  finds(replace("## Affected metrics\n\nText.", "## Affected metrics\n\n`wave` rises."),
        "'Affected metrics' names the metric 'wave'");
  finds(replace("---\n", ""), "it does not begin with a front matter");
  finds(replace("\"id\"", "id"), "its front matter is no JSON object");
  Checkout made;
  made.write("optimizations/late.md", card_text("O9", "Late"));
  ASSERT_EQ(made.lint().size(), 1u);
  EXPECT_TRUE(contains(made.lint()[0], "README.md: its index is not that of the cards"));
}

// `kb lint --fix` beside `kb add` leaves no card out.
TEST(Cards, TheIndexIsWrittenByOneAtATime) {
  Checkout made;
  std::optional<FileDescriptor> lock(lock_directory(made.dir.path() / "docs/knowledge"));
  std::future<void> other = std::async(std::launch::async, [&] { write_card_index(made.dir.path()); });
  EXPECT_EQ(other.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  lock.reset();
}

TEST(Cards, ANewOneIsATemplateInTheIndex) {
  Checkout made;
  const auto path = add_card(made.dir.path(), "languages/cute/anti-patterns/three", "Three \"times\"");
  EXPECT_EQ(path, made.dir.path() / "docs/knowledge" / "languages/cute/anti-patterns/three.md");
  EXPECT_EQ(made.cards().find("three").id, "cute-A2") << "the next one there";
  EXPECT_TRUE(contains(read_file(made.dir.path() / "docs/knowledge/README.md"),
                       "- [cute-A2](languages/cute/anti-patterns/three.md): Three \"times\""));
  const std::vector<std::string> problems = made.lint();
  EXPECT_EQ(problems.size(), card_sections().size() + 2) << "all sections empty, no evidence linked, no trigger";
  const std::string before = read_file(path);
  auto refusal = [&](const char* place, const char* title = "T") {
    return error_of([&] { add_card(made.dir.path(), place, title); });
  };
  EXPECT_TRUE(contains(refusal("languages/cute/anti-patterns/three"), "is there already"));
  EXPECT_EQ(read_file(path), before);
  EXPECT_TRUE(contains(refusal("optimizations/three"), "has that name already"));
  EXPECT_TRUE(contains(refusal("ideas/four"), "is no place for a card"));
  EXPECT_TRUE(contains(refusal("optimizations/Four.md"), "is no name of a card"));
  EXPECT_TRUE(contains(refusal("optimizations/"), "is no name of a card"));
  EXPECT_TRUE(contains(refusal("optimizations/four", "a\nb"), "a title is one line"));
  made.dir.write("docs/knowledge/README.md", "no index\n");
  EXPECT_TRUE(contains(refusal("optimizations/four"), "has lost the two comments"));
  EXPECT_FALSE(std::filesystem::exists(made.dir.path() / "docs/knowledge" / "optimizations/four.md"));
}

}  // namespace
}  // namespace hypermla::cards_test
