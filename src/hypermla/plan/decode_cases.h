// The steps on which kernels are checked as MlaDecode calls them: dense and by lists of tokens, all forms of the cache,
// ragged lengths and queries, cut requests, empty ones, shards and shared prefixes.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "hypermla/device/device.h"
#include "hypermla/plan/check.h"
#include "hypermla/plan/decode.h"
#include "hypermla/plan/plan.h"

namespace hypermla {

// A step of an engine. `options` are settled.
struct DecodeCase {
  MlaDecodeOptions options;
  std::vector<int> lengths;  // sparse and all of them max_tokens: plan() gets none
  std::vector<int> queries;  // of each request; empty: max_queries of each, and plan() gets no query_starts
  bool sinks = false;
  bool growing = false;  // scores grow along the tokens, so that a running maximum has to be raised late
  int shared = 0;        // tokens, whole pages, that all longer requests have in common
};
std::string to_text(const DecodeCase& of);

// Those that a version takes where `kernel`, its full name, is pinned; none where it does not decode.
std::vector<DecodeCase> decode_cases(const std::string& kernel, const KernelPlan& plan);

// That of plan/check.h for a cache in the type of the queries. In FP8 a kernel may lose more: docs/checking.md.
Tolerance decode_tolerance(const MlaDecodeOptions& options, DType output);

// A case in a device's memory, its contents drawn from `seed`. What nobody may read is NaN: tokens of no request, the
// places between pages, a row of queries behind the last; a list or a table has anything behind its end.
class DecodeStep {
 public:
  DecodeStep(DecodeCase of, const std::shared_ptr<Device>& device, std::uint64_t seed);

  // What plan() takes.
  const int* lengths() const;
  const int* query_starts() const;
  int requests() const { return int(of_.lengths.size()); }
  const int* block_table() const { return static_cast<const int*>(table_.data()); }
  std::int64_t table_stride() const { return width_; }
  // What run() takes, of a row more than there are queries.
  MlaDecodeTensors tensors() const;

  // Fills the outputs with NaN.
  void poison();
  // Compares them, as check_outputs() does; rows behind the last query must still be NaN.
  CheckResult compare(std::uint64_t seed, double budget_flops = 4e9) const;
  // Poisons, plans, runs twice as two layers would, compares. The kernels are prepared.
  CheckResult check(DecodeKernels& kernels, std::uint64_t seed, double budget_flops = 4e9);

 private:
  int queries() const { return starts_.back(); }
  float cache_scale() const;  // of FP8 with one factor
  int between() const;        // pages from one to the next
  bool here(int token) const;
  void choose_slots(std::mt19937& random);
  void fill_cache(std::mt19937& random);
  void fill_queries(std::mt19937& random);
  ReferenceOutputs reference(std::int64_t query) const;

  DecodeCase of_;
  std::shared_ptr<Device> device_;
  int fp8_, pages_ = 0, width_ = 0;
  std::vector<int> starts_ = {0};        // of queries
  std::vector<int> host_table_;          // [requests, width_]
  std::vector<std::vector<int>> slots_;  // of each request, those that are tokens, in order
  std::vector<float> tokens_;            // what slots stand for, [slots, 576]
  std::vector<unsigned char> host_cache_;
  std::vector<std::uint16_t> host_q_;
  std::vector<float> host_sinks_;
  Buffer lengths_, query_starts_, table_, cache_, q_, sinks_, factors_, o_, lse_;
};

}  // namespace hypermla
