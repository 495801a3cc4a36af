#include "hypermla/plan/choice.h"

#include <algorithm>

#include "hypermla/base/error.h"
#include "hypermla/plan/typed_plan.h"

namespace hypermla {
namespace {

bool is_latent(const KernelEntry& entry) { return entry.design == "flash_mla" || entry.design == "flash_mla_split_kv"; }

std::unique_ptr<KernelPlan> attention_plan(const KernelEntry& entry, const ChoiceProblem& at, int n,
                                           const PlannedDevice& device) {
  Json values = fields_json(at);
  values["n"] = n;
  values["prefixes"] = at.prefix > 0 && n == at.prefix ? at.prefixes : 0;
  return configure({entry}, device, {.offered = values}).plan;
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

std::vector<RankedKernel> rank_kernels(const Registry& registry, ChoiceProblem problem, const PlannedDevice& device) {
  problem.settle();
  const AttentionShape shape = attention_shape(problem);
  const Ceilings burst = ceilings_of(device.spec, problem.dtype, Load::burst),
                 sustained = ceilings_of(device.spec, problem.dtype, Load::sustained);
  std::vector<RankedKernel> ranking;
  const auto add = [&](const char* path, const KernelEntry& entry, int n, auto&& time) {
    try {
      attention_plan(entry, problem, n, device);
    } catch (const Error&) {
      return;  // it does not take this problem
    }
    ranking.push_back({path, entry, n, time(burst), time(sustained)});
  };
  for (const KernelEntry& entry : registry.all()) {
    if (!entry.runs_on(device.target.arch)) continue;
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
      const int between = best_interior_n(name, shape, 0, device.spec, problem.dtype);
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
         device.target.arch);
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
                                                  ChoiceProblem problem, const PlannedDevice& device) {
  problem.settle();
  std::vector<std::unique_ptr<KernelPlan>> plans;
  plans.push_back(attention_plan(ranked.entry, problem, ranked.n, device));
  if (is_latent(ranked.entry))
    plans.push_back(configure(registry.find_all("output_decompression", "", device.target.arch), device,
                              {.offered = fields_json(problem)})
                        .plan);
  return plans;
}

}  // namespace hypermla
