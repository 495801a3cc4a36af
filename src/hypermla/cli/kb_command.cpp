#include <algorithm>
#include <cstdio>

#include "hypermla/api/environment.h"
#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/cli/options.h"
#include "hypermla/cli/subcommand.h"
#include "hypermla/knowledge/cards.h"
#include "hypermla/profile/rules.h"

namespace hypermla {
namespace {

// A checkout, whose docs/knowledge it is.
void add_root(CLI::App& app, std::string& root) {
  app.add_option("--root", root,
                 "a checkout whose docs/knowledge is meant (default: where this program's sources are)");
}

std::filesystem::path root_or_own(const std::string& root) {
  return checkout_of(root, root.empty() ? Environment::detect().root : "");
}

Cards load_cards(const std::string& root) { return Cards::load(root_or_own(root) / "docs/knowledge"); }

int kb_list(const Words& words) {
  std::string root;
  bool json = false;
  CLI::App app("All cards: id, file below docs/knowledge, title, and the metrics that call for it.\n",
               "hypermla kb list");
  app.add_flag("--json", json, "as JSON");
  add_root(app, root);
  if (!parse(app, words)) return 0;
  const Cards cards = load_cards(root);
  Json all = Json::array();
  for (const Card& card : cards.all()) {
    const std::string when = card.when();
    if (json)
      all.push_back({{"id", card.id},
                     {"file", card.file.string()},
                     {"title", card.title},
                     {"advice", card.advice},
                     {"scope", card.scope},
                     {"control", card.control},
                     {"source", card.source},
                     {"when", when}});
    else
      fmt::print("{:<10} {:<62} {}{}\n", card.id, card.file.string(), card.title, when.empty() ? "" : ": " + when);
  }
  if (json) fmt::print("{}\n", all.dump(2));
  return 0;
}

int kb_show(const Words& words) {
  std::string root, name;
  CLI::App app("Prints a card.\n", "hypermla kb show");
  app.add_option("CARD", name, "its id (O6), or the name of its file (cga)")->required();
  add_root(app, root);
  if (!parse(app, words)) return 0;
  const Cards cards = load_cards(root);
  std::fputs(read_file(root_or_own(root) / "docs/knowledge" / cards.find(name).file).c_str(), stdout);
  return 0;
}

int kb_match(const Words& words) {
  std::string root, run;
  bool json = false;
  CLI::App app(
      "Which cards does a profile fire? Stage by stage, promising ones first, with the values that fired and the gain\n"
      "at most, of the stage and of all; those that were measured on this kernel before and refuted come last.\n",
      "hypermla kb match");
  app.add_option("PROFILE", run, "a run: its directory below out/profiles, or its profile.json")->required();
  app.add_flag("--json", json, "as JSON");
  add_root(app, root);
  if (!parse(app, words)) return 0;
  const Cards cards = load_cards(root);
  const Profile profile = load_profile(run);
  if (profile.stages.empty()) fail("the profile of {} has no stage; profile it again", profile.kernel);
  Json stages = Json::array();
  for (const ProfileStage& stage : profile.stages) {
    if (!stage.group.empty()) continue;  // judged as a group
    Json fired = Json::array();
    const double share = share_of_time(profile, stage);
    for (const CardMatch& one : match_cards(profile, stage, cards)) {
      fired.push_back({{"id", one.card->id},
                       {"title", one.card->title},
                       {"card", "docs/knowledge/" + one.card->file.string()},
                       {"trigger", one.trigger},
                       {"gain_percent", one.gain_percent},
                       {"gain_percent_of_all", share * one.gain_percent}});
      if (one.refuted) fired.back()["refuted"] = {{"figure", one.refuted->figure}, {"where", one.refuted->where}};
    }
    stages.push_back({{"stage", stage.name}, {"share", share}, {"cards", fired}});
  }
  if (json) {
    fmt::print("{}\n", Json{{"kernel", profile.kernel}, {"stages", stages}}.dump(2));
    return 0;
  }
  for (const Json& stage : stages) {
    const double share = stage["share"];
    fmt::print("{}{}:{}\n", stage["stage"].get<std::string>(),
               share < 1 ? fmt::format(", {:.0f} % of the time", 100 * share) : "",
               stage["cards"].empty() ? " no card fires" : "");
    for (const Json& one : stage["cards"]) {
      const double gain = one["gain_percent"], of_all = one["gain_percent_of_all"];
      std::string promised = gain >= 1 ? fmt::format(" - est. {:g} %", gain) : "";
      if (gain >= 1 && share < 1) promised += fmt::format(" of this stage, {:.1f} % of all", of_all);
      fmt::print("  {:<8} {}{} - {}\n", one["id"].get<std::string>(), one["title"].get<std::string>(), promised,
                 one["trigger"].get<std::string>());
      if (one.contains("refuted"))
        fmt::print("           REFUTED for this kernel: {} ({})\n", one["refuted"]["figure"].get<std::string>(),
                   one["refuted"]["where"].get<std::string>());
    }
  }
  return 0;
}

int kb_lint(const Words& words) {
  std::string root;
  bool fix = false;
  CLI::App app(
      "Checks all cards: front matter, sections, links, the metrics of their triggers, and the index in README.md.\n"
      "Exit status: 0 when nothing is wrong, else 1.\n",
      "hypermla kb lint");
  app.add_flag("--fix", fix, "write the index anew first");
  add_root(app, root);
  if (!parse(app, words)) return 0;
  const std::filesystem::path checkout = root_or_own(root);
  std::string unwritten;
  if (fix) try {
      write_card_index(checkout);
    } catch (const Error& error) {
      unwritten = error.what();
    }
  std::vector<std::string> problems = lint_cards(checkout, signal_names());
  const auto is_said = [&](const std::string& problem) { return unwritten.find(problem) != std::string::npos; };
  if (!unwritten.empty() && std::none_of(problems.begin(), problems.end(), is_said)) problems.push_back(unwritten);
  for (const std::string& problem : problems) fmt::print("{}\n", problem);
  if (!problems.empty()) return 1;
  fmt::print("{} cards, nothing is wrong\n", Cards::load(checkout / "docs/knowledge").all().size());
  return 0;
}

int kb_add(const Words& words) {
  std::string root, place, title;
  CLI::App app(
      "Makes a card from the template, with an id of its own, and lists it in the index. `hypermla kb lint` then "
      "names\n"
      "the sections that are still empty.\n",
      "hypermla kb add");
  app.add_option("PLACE", place, "directory and name below docs/knowledge: optimizations/my-idea")->required();
  app.add_option("--title", title, "what to do, in a few words")->required();
  add_root(app, root);
  if (!parse(app, words)) return 0;
  require_utf8("--title", title);
  fmt::print("made {}; fill its sections, then run `hypermla kb lint`\n",
             add_card(root_or_own(root), place, title).string());
  return 0;
}

}  // namespace

int kb_command(const Words& words) {
  return run_subcommand("kb",
                        {{"list", "", "all cards", kb_list},
                         {"show", "CARD", "one card", kb_show},
                         {"match", "PROFILE", "the cards that a profile fires", kb_match},
                         {"lint", "", "what is wrong with the cards", kb_lint},
                         {"add", "PLACE --title=...", "a new card from the template", kb_add}},
                        words);
}

}  // namespace hypermla
