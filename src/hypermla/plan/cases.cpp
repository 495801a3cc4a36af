#include "hypermla/plan/cases.h"

#include <algorithm>
#include <set>
#include <string>

#include "hypermla/base/error.h"
#include "hypermla/base/hash.h"
#include "hypermla/plan/configure.h"
#include "hypermla/plan/decode_cases.h"

namespace hypermla {
namespace {

// What some kernels offer beyond the usual fields, switched off: a case says all of it, since a plan keeps what it was
// told.
const Json kPlain = {{"ragged", false},       {"page", 0},    {"pages", 0}, {"fused", false},
                     {"lse_base2", false},    {"scale", 0.0}, {"split", 0}, {"prefixes", 0},
                     {"tokens_first", false}, {"after", 0},   {"parts", 1}, {"fp8", 0},
                     {"fp8_queries", false}};

bool has_field(KernelPlan& plan, std::string_view name) {
  const std::vector<FieldRef> fields = plan.problem_fields();
  return std::any_of(fields.begin(), fields.end(), [&](const FieldRef& field) { return field.name == name; });
}

// The values whose field the plan has, and what it offers beyond them switched off.
Json case_of(KernelPlan& plan, const Json& values) {
  Json all = kPlain;
  all["n"] = 1;  // a fixed value instead of the model's choice
  all.update(values);
  return known_fields(plan, all);
}

// Whether the plan takes a problem.
bool takes(KernelPlan& plan, const Json& problem) {
  const Json before = to_json(plan.problem_fields());
  set_problem(plan, problem);
  bool valid = true;
  try {
    plan.validate();
  } catch (const Error&) {
    valid = false;
  }
  set_problem(plan, before);
  return valid;
}

// Whether the plan has all fields of a variant and takes their values.
bool offers(KernelPlan& plan, const Json& variant) {
  for (const auto& [name, value] : variant.items())
    if (!has_field(plan, name)) return false;
  return takes(plan, case_of(plan, variant));
}

void add_unique(std::vector<Json>& cases, Json one) {
  if (std::find(cases.begin(), cases.end(), one) == cases.end()) cases.push_back(std::move(one));
}

// How many of t tokens a hybrid decompresses, and what its last stage merges: none, all, and cases in between.
Json mixture(int t, int turn) {
  const int tokens[] = {0, t, 1, t / 2 | 1, t - 1, t / 3 | 1, t * 3 / 4};
  const std::pair<int, int> parts[] = {{0, 1}, {1, 1}, {1, 0}, {3, 2}};
  return {{"n", std::min(tokens[turn % 7], t)},
          {"latent_parts", parts[turn % 4].first},
          {"decompressed_parts", parts[turn % 4].second},
          {"tokens_first", turn % 5 == 4}};
}

}  // namespace

std::vector<Json> correctness_cases(KernelPlan& plan) {
  if (plan.only_decodes()) return {};
  struct Shape {
    int b, s, t, h;
  };
  constexpr Shape kShapes[] = {{1, 1, 1, 1},     {2, 1, 64, 3},    {1, 2, 63, 16},   {3, 3, 65, 1},
                               {1, 16, 1000, 3}, {2, 17, 257, 5},  {1, 32, 128, 16}, {1, 33, 300, 2},
                               {1, 64, 513, 1},  {1, 65, 129, 3},  {1, 128, 384, 2}, {1, 129, 1000, 3},
                               {1, 1, 777, 128}, {2, 4, 200, 128}, {1, 20, 7, 2}};
  const bool hybrid = has_field(plan, "n") || has_field(plan, "latent_parts");
  std::vector<Json> cases;
  int turn = 0;
  for (const char* dtype : {"bfloat16", "float16"})
    for (bool causal : {false, true})
      for (const Shape& shape : kShapes) {
        if (hybrid && causal != (dtype == std::string_view("float16")))
          continue;  // each combination is two more compilations
        Json one = {{"b", shape.b}, {"s", shape.s},   {"t", shape.t},
                    {"h", shape.h}, {"dtype", dtype}, {"causal", causal}};
        if (hybrid) one.update(mixture(shape.t, turn++));
        add_unique(cases, case_of(plan, one));
      }
  const Json kVariants[] = {
      {{"ragged", true}},
      {{"page", 16}, {"ragged", true}},
      {{"page", 32}},
      {{"page", 64}, {"ragged", true}, {"causal", true}},
      {{"page", 128}, {"ragged", true}, {"fused", true}},
      {{"page", 1}, {"ragged", true}},
      {{"fused", true}, {"causal", true}},
      {{"lse_base2", true}, {"scale", 0.05}},
      {{"fused", false}, {"after", 2}},
      {{"page", 64}, {"ragged", true}, {"after", 40}},
      {{"split", 128}},
      {{"split", 128}, {"ragged", true}, {"page", 64}},
      {{"prefixes", 1}},
      {{"prefixes", 3}, {"ragged", true}},
      {{"prefixes", 1}, {"tokens_first", true}, {"ragged", true}},
      {{"prefixes", 1}, {"parts", 3}, {"after", 40}},
      {{"prefixes", 4}, {"parts", 2}, {"after", 300}, {"ragged", true}},
  };
  constexpr Shape kVariantShapes[] = {{7, 1, 700, 16},   {5, 3, 1300, 30}, {3, 2, 3000, 128},
                                      {1, 1, 5000, 128}, {150, 1, 260, 7}, {3, 50, 200, 128}};
  // Decompressed tokens are many times as large.
  constexpr Shape kHybridShapes[] = {{7, 1, 150, 16}, {5, 3, 333, 5}, {3, 50, 200, 3}, {40, 1, 65, 7}};
  const bool decompressed = has_field(plan, "n");
  for (const Json& variant : kVariants) {
    if (!offers(plan, variant)) continue;
    const std::vector<Shape> shapes = decompressed
                                          ? std::vector<Shape>(std::begin(kHybridShapes), std::end(kHybridShapes))
                                          : std::vector<Shape>(std::begin(kVariantShapes), std::end(kVariantShapes));
    for (const Shape& shape : shapes) {
      Json one = {{"b", shape.b}, {"s", shape.s}, {"t", shape.t}, {"h", shape.h}};
      one["dtype"] = shape.s == 3 ? "float16" : "bfloat16";
      one["causal"] = shape.s > 1;
      if (decompressed) one["n"] = mixture(shape.t, turn++)["n"];
      one.update(variant);
      if (one.contains("prefixes")) one["prefixes"] = std::min(one["prefixes"].get<int>(), shape.b);
      add_unique(cases, case_of(plan, one));
    }
  }
  // A hybrid may refuse a mask that ends inside its latent part.
  if (hybrid) std::erase_if(cases, [&](const Json& one) { return !takes(plan, one); });
  return cases;
}

std::vector<Json> representative_problems(KernelPlan& plan) {
  if (plan.only_decodes()) return {};
  std::vector<Json> problems;
  // The hybrid has many kernels, and is for the queries between.
  for (int s : has_field(plan, "n") ? std::vector<int>{16, 64} : std::vector<int>{1, 16, 32, 64, 128})
    add_unique(problems, case_of(plan, {{"b", 32}, {"s", s}, {"t", 4096}, {"h", 128}, {"n", -1}}));
  return problems;
}

bool tries_all_tilings(const Json& correctness_case) {
  for (const auto& [name, value] : kPlain.items())
    if (correctness_case.value(name, value) != value) return false;
  return correctness_case.value("s", 1) % 16 != 0 && correctness_case.value("dtype", "") == "bfloat16";
}

std::vector<KernelSource> kernel_sources(const KernelPlan& plan, bool candidates) {
  std::vector<KernelSource> sources;
  const std::unique_ptr<Executable> executable = plan_empty(plan);
  for (TiledKernel* kernel : executable->kernels()) {
    sources.push_back(kernel->source(kernel->tiling()));
    if (!candidates) continue;
    for (const Json& tiling : kernel->candidates()) sources.push_back(kernel->source(tiling));
  }
  return sources;
}

std::vector<KernelSource> prefill_sources(const KernelPlan& plan, DType dtype) {
  std::vector<KernelSource> sources;
  // Rows with what decompressed prefixes take.
  for (const auto& [causal, rows] : {std::pair(false, false), {true, false}, {false, true}}) {
    MlaPrefillOptions options{.dtype = dtype, .causal = causal, .query_rows = rows};
    settle(options);
    if (const std::unique_ptr<PrefillKernels> prefill = plan.prefill(options))
      for (KernelSource& source : prefill->sources()) sources.push_back(std::move(source));
  }
  return sources;
}

std::vector<KernelSource> decode_sources(const KernelPlan& plan) {
  std::vector<KernelSource> sources;
  std::set<std::string> seen;
  const auto add = [&](MlaDecodeOptions options) {
    settle(options);
    if (const std::unique_ptr<DecodeKernels> decode = plan.decode(options))
      for (KernelSource& source : decode->sources())
        if (seen.insert(source.instance).second) sources.push_back(std::move(source));
  };
  // Tilings follow from the rows of a request and, where they are few, from the requests.
  for (const int heads : {16, 32, 128, 256})
    for (const int requests : {1, 256})
      for (const DType dtype : {DType::bfloat16, DType::float16})
        for (const int page : {1, 16, 32, 64, 128})
          for (const bool causal : {true, false})
            add({.heads = heads,
                 .max_requests = requests,
                 .max_tokens = 131072,
                 .page = page,
                 .dtype = dtype,
                 .causal = causal});
  // Lists of chosen tokens: pages of 1 for the kernel, for any page of the cache.
  for (const int heads : {16, 32, 128, 256})
    for (const int requests : {1, 256}) {
      add({.heads = heads, .max_requests = requests, .dtype = DType::float16, .sparse = true});
      for (const MlaCacheFormat format : {MlaCacheFormat::as_queries, MlaCacheFormat::fp8_656})
        add({.heads = heads, .max_requests = requests, .sparse = true, .cache_format = format});
    }
  // Caches in FP8 under queries in bfloat16.
  for (const int heads : {16, 32, 128, 256})
    for (const int requests : {1, 256})
      for (const MlaCacheFormat format : {MlaCacheFormat::fp8_656, MlaCacheFormat::fp8_576})
        for (const bool causal : {true, false})
          add({.heads = heads,
               .max_requests = requests,
               .max_tokens = 131072,
               .causal = causal,
               .cache_format = format});
  for (const int split : fixed_splits())
    for (const MlaCacheFormat format : {MlaCacheFormat::as_queries, MlaCacheFormat::fp8_656})
      add({.heads = 16, .max_tokens = split, .cache_format = format, .split = split});
  // GPUs that share a context. Tokens in FP8 are gathered, whatever their pages.
  for (const int heads : {16, 32, 128, 256})
    for (const int requests : {1, 256}) {
      for (const int page : {1, 16, 32, 64, 128})
        add({.heads = heads, .max_requests = requests, .max_tokens = 131072, .page = page, .shards = 2});
      for (const MlaCacheFormat format : {MlaCacheFormat::fp8_656, MlaCacheFormat::fp8_576})
        add({.heads = heads, .max_requests = requests, .max_tokens = 131072, .cache_format = format, .shards = 2});
    }
  // Shared prefixes. What attends to them follows from the queries of all requests: of one row tile, two, or many.
  for (const int requests : {1, 8, 256})
    for (const int page : {1, 16, 32, 64, 128})
      add({.heads = 16, .max_requests = requests, .max_tokens = 131072, .page = page, .shared_prefixes = true});
  // Queries in FP8.
  for (const int heads : {16, 32, 48, 128, 256})
    for (const int page : {16, 32, 64, 128})
      for (const auto& [causal, shards] : {std::pair{true, 1}, {false, 1}, {true, 2}})
        add({.heads = heads,
             .max_tokens = 131072,
             .page = page,
             .causal = causal,
             .cache_format = MlaCacheFormat::fp8_576,
             .fp8_queries = true,
             .shards = shards});
  return sources;
}

std::vector<KernelSource> verification_sources(const KernelEntry& entry, const Target& target) {
  const std::unique_ptr<KernelPlan> plan = entry.make();
  plan->target = target;
  std::vector<KernelSource> sources;
  std::set<std::string> seen;
  const auto add = [&](std::vector<KernelSource> more) {
    for (KernelSource& source : more)
      if (seen.insert(source.instance).second) sources.push_back(std::move(source));
  };
  for (const Json& one : correctness_cases(*plan)) {
    set_problem(*plan, one);
    add(kernel_sources(*plan, tries_all_tilings(one)));
  }
  for (const DecodeCase& one : decode_cases(entry.full_name(), *plan)) add(plan->decode(one.options)->sources());
  return sources;
}

std::string verification_launches(const KernelEntry& entry) {
  const std::unique_ptr<KernelPlan> plan = entry.make();
  std::string all;
  for (const Json& one : correctness_cases(*plan)) {
    set_problem(*plan, one);
    const std::unique_ptr<Executable> executable = plan_empty(*plan);
    for (TiledKernel* kernel : executable->kernels()) {
      std::vector<Json> tilings = {kernel->tiling()};
      if (tries_all_tilings(one))
        tilings.insert(tilings.end(), kernel->candidates().begin(), kernel->candidates().end());
      for (const Json& tiling : tilings) {
        kernel->set_tiling(tiling);
        const Grid grid = kernel->grid();
        const LaunchShape shape = kernel->shape();
        const KernelSource source = kernel->source(tiling);
        all += fmt::format("{} {} grid {} {} {} shape {} {} {} {} arguments {}\n", source.instance, tiling.dump(),
                           grid.x, grid.y, grid.z, shape.threads, shape.shared_bytes, shape.cluster,
                           shape.overlaps_previous, fmt::join(source.arguments, " "));
      }
    }
  }
  return content_hash(all);
}

}  // namespace hypermla
