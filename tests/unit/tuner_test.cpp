#include "hypermla/tune/tuner.h"

#include <gtest/gtest.h>

#include <map>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "hypermla/base/error.h"

namespace hypermla::tuner_test {
namespace {

Candidate candidate(int id, double predicted) { return {{{"Bm", 16 * id}, {"Bn", 64}}, predicted}; }

// The device of these tests: candidates with known true times, and a noise that is a function of the seed, the
// candidate and the number of the sample, so that an interrupted run meets the same times as an uninterrupted one.
struct Bench {
  std::vector<Candidate> candidates;
  std::vector<double> truth;
  std::vector<int> taken;
  std::uint64_t seed = 0;
  double noise = 0.05;        // standard deviation of one sample
  double outlier_rate = 0.1;  // samples that take up to four times as long

  // True times 1 to 3 times the best's; predictions that are right to about 30 %.
  static Bench random(std::uint64_t seed, int count) {
    Bench bench;
    bench.seed = seed;
    std::mt19937_64 generator(seed);
    std::uniform_real_distribution<double> uniform;
    std::normal_distribution<double> normal;
    for (int i = 0; i < count; ++i) {
      bench.truth.push_back(1e-4 * (1 + 2 * uniform(generator)));
      bench.candidates.push_back(candidate(i, bench.truth[i] * std::exp(0.3 * normal(generator))));
    }
    bench.taken.assign(count, 0);
    return bench;
  }

  static Bench of(std::vector<double> truth) {
    Bench bench;
    for (std::size_t i = 0; i < truth.size(); ++i) bench.candidates.push_back(candidate(static_cast<int>(i), truth[i]));
    bench.truth = std::move(truth);
    bench.taken.assign(bench.truth.size(), 0);
    return bench;
  }

  std::vector<double> measure(int index, int count) {
    std::vector<double> seconds;
    for (int i = 0; i < count; ++i) {
      std::seed_seq sequence{seed, static_cast<std::uint64_t>(index), static_cast<std::uint64_t>(taken[index]++)};
      std::mt19937_64 generator(sequence);
      const double sample = truth[index] * (1 + noise * std::normal_distribution<double>()(generator));
      const bool outlier = std::uniform_real_distribution<double>()(generator) < outlier_rate;
      seconds.push_back(outlier ? sample * (1 + 3 * std::uniform_real_distribution<double>()(generator)) : sample);
    }
    return seconds;
  }

  void step(Tuner& tuner) {
    const int index = tuner.next().value();
    tuner.record(index, measure(index, tuner.samples_wanted(index)));
  }

  double best_time() const { return *std::min_element(truth.begin(), truth.end()); }
  int total() const { return std::accumulate(taken.begin(), taken.end(), 0); }
};

void run(Tuner& tuner, Bench& bench) {
  for (int steps = 0; tuner.next(); ++steps) {
    ASSERT_LT(steps, 10000) << "the tuner does not end";
    bench.step(tuner);
  }
}

TEST(Tuner, FindsTheBestWithinTwoPercentUnderNoise) {
  constexpr int kSeeds = 400, kCandidates = 24;
  int found = 0, samples = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    Bench bench = Bench::random(seed, kCandidates);
    Tuner tuner(bench.candidates);
    run(tuner, bench);
    found += bench.truth[tuner.best().value()] <= 1.02 * bench.best_time();
    samples += bench.total();
  }
  RecordProperty("found_percent", 100 * found / kSeeds);
  EXPECT_GE(found, kSeeds * 95 / 100);
  EXPECT_LT(samples, kSeeds * kCandidates * 15 / 2);  // less than half of what measuring all to the end would take
}

TEST(Tuner, IsExactWithoutNoise) {
  Bench bench = Bench::of({1.5e-4, 1.1e-4, 1.09e-4, 1.0e-4, 1.02e-4});
  bench.noise = bench.outlier_rate = 0;
  Tuner tuner(bench.candidates);
  run(tuner, bench);
  EXPECT_EQ(tuner.best(), 3);
  EXPECT_EQ(tuner.median_seconds(3), 1.0e-4);
  EXPECT_EQ(bench.taken, (std::vector<int>{3, 6, 6, 6, 6}));  // six samples are the fewest that separate
}

TEST(Tuner, MeasuresInOrderOfPredictionUnknownLastAndHopelessNever) {
  const double unknown = std::nan("");
  const std::vector<Candidate> candidates{candidate(0, 3), candidate(1, unknown), candidate(2, 1), candidate(3, 4.01),
                                          candidate(4, 2), candidate(5, -1),      candidate(6, 4)};
  Tuner tuner(candidates);
  EXPECT_EQ(tuner.upcoming(100), (std::vector<int>{2, 4, 0, 6, 1, 5}));
  EXPECT_EQ(tuner.upcoming(2), (std::vector<int>{2, 4}));
  EXPECT_EQ(tuner.next(), 2);
  tuner.record(2, {1, 1, 1});
  EXPECT_EQ(tuner.next(), 4);
  tuner.reject(4, "does not compile");
  EXPECT_EQ(tuner.next(), 0);
  EXPECT_EQ(tuner.upcoming(100), (std::vector<int>{0, 6, 1, 5}));
}

TEST(Tuner, WhatIsSkippedIsTriedAgainAndWhatIsRejectedWithThisCompilerIsNot) {
  const std::vector<Candidate> candidates{candidate(0, 1), candidate(1, 2), candidate(2, 3)};
  Tuner tuner(candidates, {.compiler = "g++ 12"});
  tuner.skip(0, "the disk is full");
  tuner.reject(1, "does not compile");
  EXPECT_EQ(tuner.next(), 2);
  tuner.record(2, {1, 1, 1});
  EXPECT_EQ(tuner.best(), 2);
  EXPECT_EQ(tuner.skipped(), (Tuner::LeftOut{{"the disk is full", 1}}));
  EXPECT_EQ(tuner.rejected(), (Tuner::LeftOut{{"does not compile", 1}}));
  const std::map<std::string, std::vector<int>> left{{"g++ 12", {0}}, {"", {0}}, {"g++ 13", {0, 1}}};
  for (const auto& [compiler, upcoming] : left)
    EXPECT_EQ(Tuner(candidates, {.compiler = compiler}, tuner.history()).upcoming(100), upcoming) << compiler;
  Json before = tuner.history();  // as histories were, that do not name the compiler
  for (Json& entry : before) entry.erase("compiler");
  EXPECT_EQ(Tuner(candidates, {.compiler = "g++ 12"}, before).upcoming(100), (std::vector<int>{0, 1}));
}

TEST(Tuner, MeasuresARepeatedTilingOnce) {
  std::vector<Candidate> candidates{candidate(1, 2), candidate(1, 1), candidate(2, 3)};
  candidates[0].tiling = {{"Bn", 64}, {"Bm", 16}};  // the same fields in another order
  EXPECT_EQ(Tuner(candidates).upcoming(9), (std::vector<int>{1, 2}));
}

TEST(Tuner, DropsTheClearlySlowerAtOnce) {
  std::vector<double> truth{1e-4, 1.01e-4};
  for (int i = 0; i < 20; ++i) truth.push_back(2e-4 + i * 1e-6);
  Bench bench = Bench::of(truth);
  bench.outlier_rate = 0;
  Tuner tuner(bench.candidates);
  run(tuner, bench);
  for (int i = 2; i < 22; ++i) EXPECT_EQ(bench.taken[i], 3) << i;
  EXPECT_GE(bench.taken[0], 6);
  EXPECT_LE(bench.taken[0], 15);
  EXPECT_LE(tuner.best().value(), 1);
}

TEST(Tuner, OneDisturbedSampleDropsNobody) {
  Tuner tuner({candidate(0, 1), candidate(1, 2)});
  tuner.record(0, {1, 1, 1});
  tuner.record(1, {5, 9, 0.5});
  ASSERT_TRUE(tuner.next());
  std::vector<int> asked;
  while (const auto index = tuner.next()) {
    asked.push_back(*index);
    tuner.record(*index, std::vector<double>(tuner.samples_wanted(*index), *index == 0 ? 1 : 0.5));
  }
  EXPECT_TRUE(std::count(asked.begin(), asked.end(), 1));
  EXPECT_EQ(tuner.best(), 1);
}

TEST(Tuner, StopsAtSamplesMaxWhenNothingSeparates) {
  Bench bench = Bench::of({1e-4, 1e-4, 1e-4});
  TunerOptions options;
  options.samples_max = 11;
  Tuner tuner(bench.candidates, options);
  run(tuner, bench);
  EXPECT_EQ(*std::max_element(bench.taken.begin(), bench.taken.end()), 11);
  EXPECT_TRUE(tuner.best());
}

TEST(Tuner, MaxIterationsCountsTheMeasuredAndNotTheRejected) {
  Bench bench = Bench::random(3, 30);
  TunerOptions options;
  options.max_iterations = 4;
  options.prune_ratio = 1e9;
  Tuner tuner(bench.candidates, options);
  const std::vector<int> order = Tuner(bench.candidates, {.prune_ratio = 1e9}).upcoming(30);
  EXPECT_EQ(tuner.upcoming(30).size(), 4u);
  for (int i = 0; i < 3; ++i) tuner.reject(order[i], "does not compile");
  run(tuner, bench);
  for (int i = 0; i < 30; ++i) EXPECT_EQ(bench.taken[order[i]] > 0, i >= 3 && i < 7) << i;
  EXPECT_TRUE(tuner.upcoming(30).empty());

  options.max_iterations = 6;  // a longer search goes on where the shorter stopped
  Tuner longer(bench.candidates, options, tuner.history());
  EXPECT_EQ(longer.upcoming(30), (std::vector<int>{order[7], order[8]}));
}

TEST(Tuner, AllRejectedHasNoBest) {
  Tuner tuner({candidate(0, 1), candidate(1, 2)});
  tuner.reject(0, "does not compile");
  tuner.record(1, {std::nan(""), 0.0, -1.0, std::numeric_limits<double>::infinity()});
  EXPECT_FALSE(tuner.next());
  EXPECT_FALSE(tuner.best());
  EXPECT_EQ(tuner.history()[0]["rejected"], "does not compile");
  EXPECT_FALSE(Tuner({}).next());
  EXPECT_FALSE(Tuner({}).best());
}

TEST(Tuner, BadSamplesAreDiscardedAndAskedForAgain) {
  Tuner tuner({candidate(0, 1)});
  tuner.record(0, {std::nan(""), 2.0, -1.0});
  EXPECT_EQ(tuner.median_seconds(0), 2.0);
  EXPECT_EQ(tuner.next(), 0);
  EXPECT_EQ(tuner.samples_wanted(0), 2);
  tuner.record(0, {1.0, 3.0});
  EXPECT_FALSE(tuner.next());
  EXPECT_EQ(tuner.best(), 0);
}

TEST(Tuner, AWrongResultTakesOutTheLeader) {
  Tuner tuner({candidate(0, 1), candidate(1, 2)});
  tuner.record(0, {1, 1, 1});
  tuner.record(1, {9, 9, 9});
  EXPECT_EQ(tuner.best(), 0);
  tuner.reject(0, "differs from the reference");
  EXPECT_EQ(tuner.best(), 1);
  EXPECT_EQ(tuner.history()[0]["seconds"].size(), 3u);
}

TEST(Tuner, ResumesIdenticallyAfterInterruptionAtEveryStep) {
  constexpr int kCandidates = 12;
  int rounds = 0;
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    Bench straight_bench = Bench::random(seed, kCandidates);
    Tuner straight(straight_bench.candidates);
    Bench bench = straight_bench;
    std::string saved = "null";
    for (int steps = 0; straight.next(); ++steps) {
      Tuner resumed(bench.candidates, {}, Json::parse(saved));  // a new process at every step
      ASSERT_EQ(resumed.next(), straight.next()) << steps;
      ASSERT_EQ(resumed.upcoming(5), straight.upcoming(5)) << steps;
      ASSERT_EQ(resumed.best(), straight.best()) << steps;
      rounds += straight.upcoming(1).empty();
      if (steps == 2) {
        resumed.reject(*resumed.next(), "does not compile");
        straight.reject(*straight.next(), "does not compile");
      } else {
        bench.step(resumed);
        straight_bench.step(straight);
      }
      saved = resumed.history().dump();
      ASSERT_EQ(saved, straight.history().dump()) << steps;
    }
    const Tuner resumed(bench.candidates, {}, Json::parse(saved));
    EXPECT_FALSE(resumed.next());
    EXPECT_EQ(resumed.best(), straight.best());
  }
  EXPECT_GT(rounds, 20);  // interruptions were not all in the first pass
}

TEST(Tuner, ForeignEntriesDecideNothingAndAreKept) {
  Tuner before({candidate(0, 1), candidate(7, 2)});
  before.record(0, {2, 2, 2});
  before.record(1, {1, 1, 1});  // the fastest, but no candidate any more
  Tuner after({candidate(0, 1), candidate(3, 2)}, {}, before.history());
  EXPECT_EQ(after.best(), 0);
  EXPECT_EQ(after.next(), 1);
  after.record(1, {3, 3, 3});
  const Tuner again({candidate(0, 1), candidate(7, 2), candidate(3, 2)}, {}, after.history());
  EXPECT_EQ(again.best(), 1);
  EXPECT_EQ(again.median_seconds(2), 3);
}

TEST(Tuner, MeasuredCandidatesStayThoughTheirPredictionWorsens) {
  Tuner before({candidate(0, 1), candidate(1, 1)});
  before.record(1, {1, 1, 1});
  EXPECT_EQ(Tuner({candidate(0, 1), candidate(1, 100)}, {}, before.history()).best(), 1);
}

TEST(Tuner, MalformedHistoryIsNotBelieved) {
  const std::vector<Candidate> candidates{candidate(0, 1), candidate(1, 2)};
  const Json tiling = candidates[0].tiling;
  const Json histories[] = {Json::object(),
                            7,
                            "x",
                            Json::array({1, nullptr, "x"}),
                            Json::array({{{"tiling", tiling}}}),
                            Json::array({{{"tiling", tiling}, {"seconds", "fast"}}}),
                            Json::array({{{"tiling", tiling}, {"seconds", {nullptr, -1, 0, "1"}}}})};
  for (const Json& history : histories) {
    const Tuner tuner(candidates, {}, history);
    EXPECT_EQ(tuner.upcoming(9), (std::vector<int>{0, 1})) << history;
    EXPECT_FALSE(tuner.best()) << history;
  }
}

// As a file that was edited may hold: 2^-n is 0 from n = 1075 on.
TEST(Tuner, ManySamplesHaveAnInterval) {
  const std::vector<Candidate> candidates{candidate(0, 1), candidate(1, 2)};
  Json history = Json::array();
  for (const Candidate& one : candidates)
    history.push_back({{"tiling", one.tiling}, {"seconds", std::vector<double>(1100, one.predicted_seconds)}});
  const Tuner tuner(candidates, {}, history);
  EXPECT_EQ(tuner.best(), 0);
  EXPECT_FALSE(tuner.next());
}

TEST(Tuner, RefusesOptionsAndIndicesWithoutSense) {
  for (const TunerOptions& options : {TunerOptions{.max_iterations = -1}, TunerOptions{.samples_first = 0},
                                      TunerOptions{.samples_first = 4, .samples_max = 3},
                                      TunerOptions{.drop_ratio = 0.9}, TunerOptions{.prune_ratio = std::nan("")}}) {
    EXPECT_THROW(Tuner({candidate(0, 1)}, options), Error);
  }
  Tuner tuner({candidate(0, 1)});
  EXPECT_THROW(tuner.record(1, {1.0}), Error);
  EXPECT_THROW(tuner.reject(-1, "why"), Error);
  EXPECT_THROW(tuner.samples_wanted(1), Error);
}

}  // namespace
}  // namespace hypermla::tuner_test
