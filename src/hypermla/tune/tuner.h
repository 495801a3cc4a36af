// The autotuner: decides what to measure next, from predictions and from the times seen so far. It uses no device,
// clock or file; its caller compiles, measures and stores:
//
//   Tuner tuner(candidates, options, store.load());
//   while (auto index = tuner.next()) {
//     compile ahead what tuner.upcoming(cores) names;
//     tuner.record(*index, measure(*index, tuner.samples_wanted(*index)));   // or reject(), or skip()
//     store.save(tuner.history());
//   }
//   use(candidates[*tuner.best()])
//
// Every decision depends only on the candidates, the options and the samples, so tuning resumes from a history where it
// stopped.
//
// First pass: candidates in order of prediction, `samples_first` samples each. One whose fastest sample exceeds
// `drop_ratio` x the best median is not measured any more. (The median would be wrong here: disturbances only make a
// kernel slower, and often two of three samples are disturbed, so the best candidate could be lost.)
//
// Rounds: the candidate with the fewest samples among those that may still be the best gets `samples_first` more, until
// it has `samples_max` or its interval lies completely above the leader's. The interval is that of the order statistics
// around the median which covers the true median with a probability of 95 % for any distribution of the noise (H. A.
// David, H. N. Nagaraja: Order Statistics, section 7.1); six samples are the fewest that have one.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "hypermla/base/fields.h"

namespace hypermla {

struct Candidate {
  Json tiling;
  double predicted_seconds;  // not finite or not positive: unknown, measured last and never pruned
};

struct TunerOptions {
  int max_iterations = 0;    // candidates to measure, those of the history included; 0: all. Rejected ones are free.
  int samples_first = 3;     // samples of one measurement
  int samples_max = 15;      // samples of one candidate
  double drop_ratio = 1.25;  // clearly slower: fastest sample above this times the best median
  double prune_ratio = 4;    // never measured: prediction above this times the best prediction
  std::string compiler =
      {};  // a rejection of the history counts if it was with this one; empty: there is none, all count
};

class Tuner {
 public:
  // `history` is what history() returned, or null. Entries whose tiling is no candidate are kept but not used;
  // malformed ones are dropped. Throws Error when an option makes no sense.
  Tuner(std::vector<Candidate> candidates, TunerOptions options = {}, const Json& history = nullptr);

  // Indices are positions in the candidates as given.
  std::optional<int> next() const;         // what to measure now; empty when done
  int samples_wanted(int index) const;     // how many samples to take of it
  std::vector<int> upcoming(int n) const;  // the next n, at most, that are to be measured for the first time

  // Adds samples. Those that are not finite and positive are discarded; when none is left the candidate is rejected.
  void record(int index, const std::vector<double>& seconds);
  // Takes a candidate out for good: it does not compile, or does not run.
  void reject(int index, std::string why);
  // Takes a candidate out for now, and leaves nothing of it in the history: what failed was not the candidate.
  void skip(int index, std::string why);

  std::optional<int> best() const;         // lowest median; empty when nothing was measured
  double median_seconds(int index) const;  // infinite when nothing was measured
  int measured() const;                    // how many candidates have samples and are not rejected
  int planned() const;                     // how many will be measured or rejected in the end, as far as is known now
  using LeftOut = std::map<std::string, int>;  // why, and how many candidates for that
  LeftOut rejected() const { return left_out(&State::rejected); }
  LeftOut skipped() const { return left_out(&State::skipped); }
  // [{"tiling": {}, "predicted_seconds": s, "median_seconds": s, "seconds": [s...], "rejected": "why",
  // "compiler": "which"}], in order of prediction, without what is unknown.
  Json history() const;

 private:
  struct State {
    std::string tiling;  // as text with sorted keys: its identity
    std::vector<double> seconds;
    std::string rejected, skipped;  // why; empty when it is not
    bool out() const { return !rejected.empty() || !skipped.empty(); }
    double fastest, median, low, high;  // of `seconds`; low to high is the 95 % interval around the median
  };
  static void set_seconds(State& state, std::vector<double> seconds);
  int check(int index) const;  // the index; throws Error when it is none
  void resume(const Json& history);
  LeftOut left_out(std::string State::*why) const;

  std::vector<Candidate> candidates_;
  TunerOptions options_;
  std::vector<State> states_;
  std::vector<int> order_;  // by prediction, without the pruned and the repeated
  std::vector<Json> foreign_;
};

}  // namespace hypermla
