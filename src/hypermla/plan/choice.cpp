#include "hypermla/plan/choice.h"

#include <algorithm>
#include <cmath>

#include "hypermla/plan/typed_plan.h"

namespace hypermla {
namespace {

// Most measured times lie within this of the model, so a hybrid must promise a larger gain.
constexpr double kMargin = 1.05;

Json values_of(const ChoiceProblem& problem, Path path, int n) {
  Json values = fields_json(problem);
  values["n"] = n;
  values["prefixes"] = path == Path::shared_prefix ? problem.prefixes : 0;
  if (problem.fp8) values["tokens_first"] = true;
  return values;
}

bool has_fields(KernelPlan& plan, const std::vector<std::string_view>& names) {
  return std::all_of(names.begin(), names.end(), [&](std::string_view name) {
    return known_fields(plan, {{std::string(name), 0}}).size() == 1;
  });
}

// The version whose path and time count: this one or, where it says nothing of them, the base version of its design.
KernelEntry counted(const Registry& registry, const KernelEntry& entry) {
  if (entry.version == "v0" || entry.make()->path() != Path::none) return entry;
  for (const KernelEntry& one : registry.all())
    if (one.version == "v0" && one.language == entry.language && one.layer == entry.layer && one.design == entry.design)
      return one;
  return entry;
}

// The times of a plan as n changes, which is in the end what it was.
class TimesOverN {
 public:
  TimesOverN(KernelPlan& plan, const DeviceSpec& device)
      : plan_(plan),
        n_(field("n")),
        said_(n_),
        t_(field("t")),
        loads_{under(device, Load::burst), under(device, Load::sustained)} {}
  ~TimesOverN() { n_ = said_; }
  TimesOverN(const TimesOverN&) = delete;

  // Of n against the better end, under the load where it looks worse.
  double ratio(int n) const {
    double worst = 0;
    for (const auto& [ceilings, best_end] : loads_) worst = std::max(worst, seconds(n, ceilings) / best_end);
    return worst;
  }
  int better_end() const { return ratio(0) <= ratio(t_) ? 0 : t_; }
  int best_between() const {
    const int step = 64 * std::max(1, t_ / (64 * 128));  // at most some 256 of them
    int best = 0;
    double least = INFINITY;
    for (int n = step; n < t_; n += step) {
      const double of_n = ratio(n);
      if (of_n < least) least = of_n, best = n;
    }
    return best;
  }

 private:
  struct UnderLoad {
    Ceilings ceilings;
    double best_end;  // seconds of n = 0 or n = t
  };
  UnderLoad under(const DeviceSpec& device, Load load) const {
    const Ceilings ceilings = ceilings_of(device, plan_.dtype(), load);
    return {ceilings, std::min(seconds(0, ceilings), seconds(t_, ceilings))};
  }
  int& field(std::string_view name) const {
    for (const FieldRef& one : plan_.problem_fields())
      if (one.name == name) return *std::get<int*>(one.value);
    fail("a kernel without --{} has no number of decompressed tokens to choose", name);
  }
  double seconds(int n, const Ceilings& ceilings) const {
    n_ = n;
    return plan_.time(ceilings).seconds;
  }

  KernelPlan& plan_;
  int& n_;
  const int said_, t_;
  const UnderLoad loads_[2];
};

}  // namespace

int best_interior_n(KernelPlan& plan, const DeviceSpec& device) { return TimesOverN(plan, device).best_between(); }

int choose_n(KernelPlan& plan, const DeviceSpec& device) {
  const TimesOverN times(plan, device);
  const int between = times.best_between();
  return between > 0 && times.ratio(between) * kMargin < 1 ? between : times.better_end();
}

void ChoiceProblem::settle() {
  for (const auto& [name, extent] : {std::pair{"b", b}, {"s", s}, {"h", h}, {"d", d}, {"p", p}, {"k", k}})
    require_positive(name, extent);
  if (prefix < 0 || own < 0) fail("--prefix={} --private={} is not supported: tokens cannot be negative", prefix, own);
  require_extents(fields_of(*this));
  if (own > 0) t = prefix + own;
  require_positive("t", t);
  if (prefix > t) fail("--prefix={} is not supported: requests have only --t={} tokens; or set --private", prefix, t);
  if (page < 0) fail("--page={} is not supported: choose 1, 16, 32, 64 or 128, or 0 for a dense cache", page);
  if (fp8 && !page) fail("--fp8={} needs a page size: add --page=64, or --page=1 for lists of chosen tokens", fp8);
  if (fp8_queries && fp8 != 576)
    fail("--fp8={} is not supported with --fp8_queries: add --fp8=576, or leave --fp8_queries out", fp8);
  if (prefixes < 1 || prefixes > b)
    fail("--prefixes={} is not supported: it must be from 1 to the {} requests", prefixes, b);
  own = 0;
}

std::vector<RankedKernel> rank_kernels(const Registry& registry, ChoiceProblem problem, const PlannedDevice& device,
                                       const std::string& language) {
  problem.settle();
  const Ceilings burst = ceilings_of(device.spec, problem.dtype, Load::burst),
                 sustained = ceilings_of(device.spec, problem.dtype, Load::sustained);
  std::vector<std::string_view> cache;  // the fields that say what is particular of it
  if (problem.page) cache.push_back("page");
  if (problem.fp8) cache.push_back("fp8");
  if (problem.fp8_queries) cache.push_back("fp8_queries");
  std::vector<RankedKernel> ranking;
  std::string refusal;  // of the first that has the fields and does not take their values
  for (const KernelEntry& entry : registry.all()) {
    if (!entry.runs_on(device.target.arch) || (!language.empty() && entry.language != language)) continue;
    const KernelEntry timed = counted(registry, entry);
    const auto add = [&](Path path, int n) {
      const Json values = values_of(problem, path, n);
      if (!has_fields(*entry.make(), cache)) return;
      try {
        configure({entry}, device, {.offered = values});
      } catch (const Error& error) {
        if (refusal.empty()) refusal = error.what();
        return;
      }
      const std::unique_ptr<KernelPlan> plan = plan_with(timed, device, {.offered = values});
      const auto time = [&](const Ceilings& ceilings) {
        TimeEstimate time = plan->time(ceilings);
        // On every device as where it was measured: it is short.
        if (const std::string next = plan->followed_by(); !next.empty())
          time.seconds += plan_with(registry.find(next), device, {.offered = values})->time(ceilings).seconds;
        return time;
      };
      ranking.push_back({path, entry, n, time(burst), time(sustained)});
    };
    switch (const Path path = timed.make()->path(); path) {
      case Path::none:
        break;
      case Path::latent:
        add(path, 0);
        break;
      case Path::decompressed:
        add(path, problem.t);
        break;
      case Path::hybrid:
      case Path::shared_prefix:  // one kernel takes both
        const auto plan = plan_with(timed, device, {.offered = values_of(problem, Path::hybrid, 0)});
        if (const int between = best_interior_n(*plan, device.spec); between > 0) add(Path::hybrid, between);
        if (problem.prefix > 0) add(Path::shared_prefix, problem.prefix);
    }
  }
  if (ranking.empty() && !refusal.empty()) fail("no kernel for {} takes this problem: {}", device.target.arch, refusal);
  if (ranking.empty())
    fail("no kernel{} for {} takes this problem; {}", language.empty() ? "" : " in the language '" + language + "'",
         device.target.arch,
         problem.page ? "pages and FP8 need Hopper: name a GPU, such as --device_name=\"NVIDIA H200\""
                      : "`hypermla kernel flash_attention --help` says what is supported, the languages are cute and "
                        "cutile");
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
  const Json values = values_of(problem, ranked.path, ranked.n);
  plans.push_back(configure({ranked.entry}, device, {.offered = values}).plan);
  if (const std::string next = counted(registry, ranked.entry).make()->followed_by(); !next.empty())
    plans.push_back(configure(registry.find_all(next, "", device.target.arch), device, {.offered = values}).plan);
  return plans;
}

}  // namespace hypermla
