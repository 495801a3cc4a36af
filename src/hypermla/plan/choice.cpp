#include "hypermla/plan/choice.h"

#include <algorithm>

#include "hypermla/plan/typed_plan.h"

namespace hypermla {
namespace {

AttentionShape shape_of(const ChoiceProblem& at) {
  return {.b = at.b,
          .s = at.s,
          .t = at.t,
          .h = at.h,
          .d = at.d,
          .p = at.p,
          .k = at.k,
          .bytes_per_element = double(dtype_bytes(at.dtype))};
}

bool is_latent(const KernelEntry& entry) { return entry.design == "flash_mla" || entry.design == "flash_mla_split_kv"; }

std::unique_ptr<KernelPlan> attention_plan(const KernelEntry& entry, const ChoiceProblem& at, int n,
                                           const Target& target) {
  std::unique_ptr<KernelPlan> plan = entry.make();
  plan->target = target;
  ChoiceProblem copy = at;
  Json values = to_json(fields_of(copy));
  values["n"] = n;
  values["prefixes"] = at.prefix > 0 && n == at.prefix ? at.prefixes : 0;
  Json known = Json::object();
  for (const FieldRef& field : plan->problem_fields())
    if (const auto found = values.find(std::string(field.name)); found != values.end()) known[found.key()] = *found;
  set_problem(*plan, known);
  return plan;
}

bool takes(const KernelEntry& entry, const ChoiceProblem& at, int n, const Target& target) {
  try {
    attention_plan(entry, at, n, target)->validate();
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

void ChoiceProblem::settle() {
  require_positive("b", b);
  require_positive("s", s);
  require_positive("h", h);
  if (prefix < 0 || own < 0) fail("--prefix={} --private={} is not supported: tokens cannot be negative", prefix, own);
  if (own > 0) t = prefix + own;
  require_positive("t", t);
  if (prefix > t) fail("--prefix={} is not supported: requests have only --t={} tokens; or set --private", prefix, t);
  if (prefixes < 1 || prefixes > b)
    fail("--prefixes={} is not supported: it must be from 1 to the {} requests", prefixes, b);
  own = 0;
}

std::vector<RankedKernel> rank_kernels(const Registry& registry, ChoiceProblem problem, const Target& target,
                                       const DeviceSpec& device) {
  problem.settle();
  const AttentionShape shape = shape_of(problem);
  const Ceilings burst = ceilings_of(device, problem.dtype, Load::burst),
                 sustained = ceilings_of(device, problem.dtype, Load::sustained);
  std::vector<RankedKernel> ranking;
  const auto add = [&](const char* path, const KernelEntry& entry, int n, auto&& time) {
    if (takes(entry, problem, n, target)) ranking.push_back({path, entry, n, time(burst), time(sustained)});
  };
  for (const KernelEntry& entry : registry.all()) {
    if (!entry.runs_on(target.arch)) continue;
    const std::string name = entry.full_name();
    if (is_latent(entry)) {
      add("latent", entry, 0, [&](const Ceilings& ceilings) {
        TimeEstimate time = attention_time(name, shape, problem.causal, ceilings);
        time.seconds += output_decompression_time(shape, ceilings).seconds;
        return time;
      });
    } else if (entry.design == "flash_attention") {
      add("decompressed", entry, problem.t,
          [&](const Ceilings& ceilings) { return attention_time(name, shape, problem.causal, ceilings); });
    } else if (entry.design == "mla_var6_plus") {
      const int between = best_interior_n(name, shape, 0, device, problem.dtype);
      if (between > 0)
        add("hybrid", entry, between,
            [&](const Ceilings& ceilings) { return hybrid_time(name, shape, between, 0, ceilings); });
      if (problem.prefix > 0)
        add("shared prefix", entry, problem.prefix, [&](const Ceilings& ceilings) {
          return hybrid_time(name, shape, problem.prefix, problem.prefixes, ceilings);
        });
    }
  }
  if (ranking.empty())
    fail("no kernel for {} takes this problem; `hypermla kernel flash_attention --help` says what is supported",
         target.arch);
  std::reverse(ranking.begin(), ranking.end());  // the registry lists older versions first
  std::stable_sort(ranking.begin(), ranking.end(), [](const RankedKernel& a, const RankedKernel& b) {
    return a.sustained.seconds < b.sustained.seconds;
  });
  return ranking;
}

const RankedKernel& choice(const std::vector<RankedKernel>& ranking) {
  const auto found =
      std::find_if(ranking.begin(), ranking.end(), [](const RankedKernel& one) { return !one.entry.draft; });
  return found != ranking.end() ? *found : ranking.front();
}

std::vector<std::unique_ptr<KernelPlan>> plans_of(const Registry& registry, const RankedKernel& ranked,
                                                  ChoiceProblem problem, const Target& target) {
  problem.settle();
  std::vector<std::unique_ptr<KernelPlan>> plans;
  plans.push_back(attention_plan(ranked.entry, problem, ranked.n, target));
  if (is_latent(ranked.entry))
    plans.push_back(
        choose_plan(registry.find_all("output_decompression", "", target.arch), target, [&](KernelPlan& plan) {
          set_problem(plan, {{"b", problem.b},
                             {"s", problem.s},
                             {"h", problem.h},
                             {"d", problem.d},
                             {"k", problem.k},
                             {"dtype", dtype_name(problem.dtype)}});
        }).plan);
  for (const auto& plan : plans) plan->validate();
  return plans;
}

}  // namespace hypermla
