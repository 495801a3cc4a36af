#include "hypermla/tune/tuner.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "hypermla/base/error.h"

namespace hypermla {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool valid(double seconds) { return std::isfinite(seconds) && seconds > 0; }

// Two tilings are the same when their fields are, in any order.
std::string identity(const Json& tiling) {
  return nlohmann::json(tiling).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

double median_of(const std::vector<double>& sorted) {
  if (sorted.empty()) return kInfinity;
  const std::size_t middle = sorted.size() / 2;
  return sorted.size() % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// The narrowest pair of order statistics, as far from the lower as from the upper end, between which the true median
// lies with a probability of 95 %; unbounded when there are too few samples for one. A sample is below the median with
// probability 1/2, so the pair (k, n + 1 - k) misses it with probability 2 P(Binomial(n, 1/2) < k). Of more than 1000
// samples, whose 2^-n may be no number, the k of 1000 is taken: the pair is wider than it need be.
std::pair<double, double> median_interval(const std::vector<double>& sorted) {
  const std::size_t n = std::min<std::size_t>(sorted.size(), 1000);
  std::size_t k = 0;
  double chance = std::pow(0.5, static_cast<double>(n));  // P(Binomial = k)
  for (double below = chance; 2 * below <= 0.05; below += chance) {
    ++k;
    chance *= static_cast<double>(n - k + 1) / static_cast<double>(k);
  }
  if (k == 0) return {-kInfinity, kInfinity};
  return {sorted[k - 1], sorted[sorted.size() - k]};
}

}  // namespace

Tuner::Tuner(std::vector<Candidate> candidates, TunerOptions options, const Json& history)
    : candidates_(std::move(candidates)), options_(options) {
  if (options_.max_iterations < 0)
    fail("max_iterations is {}; use 0 to measure all candidates", options_.max_iterations);
  if (options_.samples_first < 1 || options_.samples_max < options_.samples_first) {
    fail("samples_first is {} and samples_max {}; use 1 <= samples_first <= samples_max", options_.samples_first,
         options_.samples_max);
  }
  if (!(options_.drop_ratio >= 1 && options_.prune_ratio >= 1)) {
    fail("drop_ratio is {} and prune_ratio {}; use at least 1", options_.drop_ratio, options_.prune_ratio);
  }
  double best_prediction = kInfinity;
  for (Candidate& candidate : candidates_) {
    if (!valid(candidate.predicted_seconds)) candidate.predicted_seconds = kInfinity;
    best_prediction = std::min(best_prediction, candidate.predicted_seconds);
    states_.push_back({identity(candidate.tiling), {}, {}, {}, kInfinity, kInfinity, -kInfinity, kInfinity});
  }
  resume(history);

  std::vector<int> sorted(candidates_.size());
  std::iota(sorted.begin(), sorted.end(), 0);
  auto prediction = [&](int index) { return candidates_[index].predicted_seconds; };
  std::stable_sort(sorted.begin(), sorted.end(), [&](int a, int b) { return prediction(a) < prediction(b); });
  std::set<std::string_view> seen;
  for (const int index : sorted) {
    const bool hopeless =
        std::isfinite(prediction(index)) && prediction(index) > options_.prune_ratio * best_prediction;
    if (hopeless && states_[index].seconds.empty()) continue;
    if (seen.insert(states_[index].tiling).second) order_.push_back(index);
  }
}

void Tuner::resume(const Json& history) {
  if (!history.is_array()) return;
  for (const Json& entry : history) {
    if (!entry.is_object() || !entry.contains("tiling") || !entry.contains("seconds")) continue;
    const std::string tiling = identity(entry["tiling"]);
    bool known = false;
    for (State& state : states_) {  // all copies of a tiling that is listed twice
      if (state.tiling != tiling) continue;
      known = true;
      std::vector<double> seconds;
      for (const Json& sample : entry["seconds"]) {
        if (sample.is_number() && valid(sample.get<double>())) seconds.push_back(sample.get<double>());
      }
      set_seconds(state, std::move(seconds));
      if (entry.contains("rejected") && entry["rejected"].is_string() &&
          (options_.compiler.empty() || entry.value("compiler", Json()) == options_.compiler))
        state.rejected = entry["rejected"].get<std::string>();
    }
    if (!known) foreign_.push_back(entry);
  }
}

void Tuner::set_seconds(State& state, std::vector<double> seconds) {
  std::vector<double> sorted = seconds;
  std::sort(sorted.begin(), sorted.end());
  state.seconds = std::move(seconds);
  state.fastest = sorted.empty() ? kInfinity : sorted.front();
  state.median = median_of(sorted);
  std::tie(state.low, state.high) = median_interval(sorted);
}

int Tuner::check(int index) const {
  if (index < 0 || index >= static_cast<int>(states_.size())) {
    fail("there is no candidate {}; use an index that next() or upcoming() returned", index);
  }
  return index;
}

int Tuner::measured() const {
  return static_cast<int>(std::count_if(order_.begin(), order_.end(),
                                        [&](int i) { return !states_[i].out() && !states_[i].seconds.empty(); }));
}

int Tuner::planned() const {
  const auto out = std::count_if(order_.begin(), order_.end(), [&](int i) { return states_[i].out(); });
  return measured() + static_cast<int>(out) + static_cast<int>(upcoming(static_cast<int>(order_.size())).size());
}

std::vector<int> Tuner::upcoming(int n) const {
  if (options_.max_iterations > 0) n = std::min(n, options_.max_iterations - measured());
  std::vector<int> indices;
  for (const int index : order_) {
    if (static_cast<int>(indices.size()) >= n) break;
    if (!states_[index].out() && states_[index].seconds.empty()) indices.push_back(index);
  }
  return indices;
}

std::optional<int> Tuner::next() const {
  // First pass: finish the candidate under way, then the next by prediction.
  for (const int index : order_) {
    const State& state = states_[index];
    const int count = static_cast<int>(state.seconds.size());
    if (!state.out() && count > 0 && count < options_.samples_first) return index;
  }
  if (const std::vector<int> first = upcoming(1); !first.empty()) return first[0];

  // Rounds: candidates with the fewest samples first, so that a drift of the device affects all alike.
  const std::optional<int> leader = best();
  if (!leader) return std::nullopt;
  std::optional<int> fewest;
  bool contested = false;
  for (const int index : order_) {
    const State& state = states_[index];
    const bool in_race = !state.out() && !state.seconds.empty();
    if (!in_race || state.fastest > options_.drop_ratio * states_[*leader].median) continue;
    if (state.low > states_[*leader].high) continue;
    contested = contested || index != *leader;
    if (static_cast<int>(state.seconds.size()) >= options_.samples_max) continue;
    if (!fewest || state.seconds.size() < states_[*fewest].seconds.size()) fewest = index;
  }
  return contested ? fewest : std::nullopt;
}

int Tuner::samples_wanted(int index) const {
  const int count = static_cast<int>(states_[check(index)].seconds.size());
  if (count < options_.samples_first) return options_.samples_first - count;
  return std::clamp(options_.samples_max - count, 0, options_.samples_first);
}

void Tuner::record(int index, const std::vector<double>& seconds) {
  State& state = states_[check(index)];
  std::vector<double> all = state.seconds;
  std::copy_if(seconds.begin(), seconds.end(), std::back_inserter(all), valid);
  if (all.size() == state.seconds.size()) return reject(index, "no sample was a finite and positive time");
  set_seconds(state, std::move(all));
}

void Tuner::reject(int index, std::string why) {
  states_[check(index)].rejected = why.empty() ? "rejected" : std::move(why);
}

void Tuner::skip(int index, std::string why) {
  states_[check(index)].skipped = why.empty() ? "skipped" : std::move(why);
}

Tuner::LeftOut Tuner::left_out(std::string State::*why) const {
  LeftOut all;
  for (const int index : order_)
    if (!(states_[index].*why).empty()) ++all[states_[index].*why];
  return all;
}

std::optional<int> Tuner::best() const {
  std::optional<int> best;
  for (const int index : order_) {
    const State& state = states_[index];
    if (state.out() || state.seconds.empty()) continue;
    if (!best || state.median < states_[*best].median) best = index;
  }
  return best;
}

double Tuner::median_seconds(int index) const { return states_[check(index)].median; }

Json Tuner::history() const {
  Json entries = Json::array();
  for (const int index : order_) {
    const State& state = states_[index];
    if (state.seconds.empty() && state.rejected.empty()) continue;
    Json entry = {{"tiling", candidates_[index].tiling}};
    if (valid(candidates_[index].predicted_seconds)) entry["predicted_seconds"] = candidates_[index].predicted_seconds;
    if (!state.seconds.empty()) entry["median_seconds"] = state.median;
    entry["seconds"] = state.seconds;
    if (!state.rejected.empty()) {
      entry["rejected"] = state.rejected;
      entry["compiler"] = options_.compiler;
    }
    entries.push_back(std::move(entry));
  }
  for (const Json& entry : foreign_) entries.push_back(entry);
  return entries;
}

}  // namespace hypermla
