#include "hypermla/plan/check.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "hypermla/plan/configure.h"

namespace hypermla {
namespace {

struct GroupError {
  double difference_squared = 0, expected_squared = 0;
  double worst = -1;
  std::int64_t worst_index = 0;  // within the group
  double got = 0, expected = 0;
  bool passed = true;
};

// `reach`: of each element of an fp32 output; null: the scale is the root mean square of the row of `width` elements.
GroupError compare(const std::vector<float>& got, const std::vector<double>& expected, const std::vector<double>* reach,
                   std::size_t width, const Tolerance& allowed) {
  GroupError error;
  double rms = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (i % width == 0) {
      double squared = 0;
      for (std::size_t c = i; c < std::min(i + width, expected.size()); ++c)
        if (std::isfinite(expected[c])) squared += expected[c] * expected[c];
      error.expected_squared += squared;
      rms = std::sqrt(squared / double(width));
    }
    double excess;  // relative to what is allowed to differ
    if (std::isfinite(expected[i])) {
      double difference = std::fabs(double(got[i]) - expected[i]);
      difference = difference <= allowed.rounding ? 0 : difference - allowed.rounding;  // NaN stays
      const double scale = reach ? 1 + (*reach)[i] : rms;
      error.difference_squared += difference * difference;
      excess = difference == 0 ? 0 : difference / (std::fabs(expected[i]) + scale);
    } else {
      excess = double(got[i]) == expected[i] ? 0 : HUGE_VAL;  // infinities agree or not
    }
    if (!(excess <= allowed.elementwise)) error.passed = false;  // NaN fails
    if (!(excess <= error.worst)) {
      error.worst = std::isnan(excess) ? HUGE_VAL : excess;
      error.worst_index = std::int64_t(i);
      error.got = got[i];
      error.expected = expected[i];
    }
  }
  return error;
}

std::vector<std::int64_t> choose_groups(const ReferenceShape& shape, std::uint64_t seed, double budget_flops) {
  const double affordable = std::max(2.0, budget_flops / std::max(shape.flops_per_group, 1.0));
  std::vector<std::int64_t> chosen;
  if (double(shape.groups) <= affordable) {
    for (std::int64_t group = 0; group < shape.groups; ++group) chosen.push_back(group);
    return chosen;
  }
  std::mt19937_64 random(seed);
  std::set<std::int64_t> sample = {0, shape.groups - 1};
  while (double(sample.size()) < std::floor(affordable))
    sample.insert(std::uniform_int_distribution<std::int64_t>(0, shape.groups - 1)(random));
  return {sample.begin(), sample.end()};
}

std::vector<std::int64_t> unravel(std::int64_t index, const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> position(shape.size());
  for (std::size_t axis = shape.size(); axis-- > 0; index /= shape[axis]) position[axis] = index % shape[axis];
  return position;
}

}  // namespace

Tolerance tolerance(DType output, DType computed_in) {
  if (output == DType::float32) return {32 * 0x1p-24, HUGE_VAL};  // the elements say all
  const double u = computed_in == DType::float16 ? 0x1p-11 : 0x1p-9;
  return {12 * u, 3 * u, output == DType::float16 ? 0x1p-25 : 0x1p-134};
}

CheckResult compare_outputs(const ReferenceShape& shape, const std::vector<ComparedOutput>& outputs,
                            const std::function<ReferenceOutputs(std::int64_t group)>& reference, std::uint64_t seed,
                            double budget_flops) {
  const std::vector<std::int64_t> groups = choose_groups(shape, seed, budget_flops);
  struct Total {
    GroupError error;
    std::int64_t worst_group = 0;
  };
  std::map<std::string, Total> totals;
  std::mutex mutex;
  std::atomic<std::size_t> next{0};
  std::exception_ptr failure;
  auto work = [&] {
    try {
      for (std::size_t i; (i = next++) < groups.size();) {
        const std::int64_t group = groups[i];
        const ReferenceOutputs made = reference(group);
        for (const ComparedOutput& output : outputs) {
          const auto found = made.find(output.name);
          if (found == made.end()) fail("the reference of this plan does not make its output {}", output.name);
          const std::vector<double>& expected = found->second;
          const std::int64_t count = output.elements() / shape.groups;
          if (std::int64_t(expected.size()) != count)
            fail("the reference of this plan makes {} elements of {} in a group, not {}", expected.size(), output.name,
                 count);
          const auto reach = made.find(output.name + "_reach");
          if (output.dtype == DType::float32 && (reach == made.end() || reach->second.size() != expected.size()))
            fail("the reference of this plan does not say how far the numbers behind {} reach", output.name);
          const GroupError error =
              compare(output.read(group * count, count), expected, reach == made.end() ? nullptr : &reach->second,
                      std::size_t(output.shape.back()), output.allowed);
          std::lock_guard lock(mutex);
          Total& total = totals[output.name];
          total.error.difference_squared += error.difference_squared;
          total.error.expected_squared += error.expected_squared;
          total.error.passed &= error.passed;
          if (error.worst > total.error.worst) {
            total.error.worst = error.worst;
            total.error.worst_index = error.worst_index;
            total.error.got = error.got;
            total.error.expected = error.expected;
            total.worst_group = group;
          }
        }
      }
    } catch (...) {
      std::lock_guard lock(mutex);
      failure = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);

  CheckResult result{true, shape.groups, std::int64_t(groups.size()), {}};
  for (const ComparedOutput& output : outputs) {
    const Total& total = totals[output.name];
    OutputError error;
    error.output = output.name;
    error.relative_norm = total.error.expected_squared > 0
                              ? std::sqrt(total.error.difference_squared / total.error.expected_squared)
                              : std::sqrt(total.error.difference_squared);
    if (std::isnan(error.relative_norm)) error.relative_norm = HUGE_VAL;
    error.worst = total.error.worst;
    error.worst_position =
        unravel(total.worst_group * (output.elements() / shape.groups) + total.error.worst_index, output.shape);
    error.got = total.error.got;
    error.expected = total.error.expected;
    error.passed = total.error.passed && error.relative_norm <= output.allowed.norm;
    result.passed &= error.passed;
    result.outputs.push_back(error);
  }
  return result;
}

CheckResult check_outputs(const KernelPlan& plan, const AllocatedTensors& tensors, Device& device, std::uint64_t seed,
                          double budget_flops) {
  std::vector<ComparedOutput> outputs;
  for (const TensorSpec& spec : plan.tensors()) {
    if (spec.role != Role::output) continue;
    const Tensor& tensor = tensors.tensors().at(spec.name);
    outputs.push_back(
        {spec.name, tensor.dtype, tensor.shape, plan.allowed(tensor.dtype),
         [&](std::int64_t first, std::int64_t count) { return read_floats(device, tensor, first, count); }});
  }
  const InputReader reader = tensors.reader();
  return compare_outputs(
      plan.reference_shape(), outputs, [&](std::int64_t group) { return plan.reference(group, reader); }, seed,
      budget_flops);
}

CheckResult check(const KernelPlan& plan, Executable& executable, AllocatedTensors& tensors, Device& device,
                  std::uint64_t seed, double budget_flops) {
  tensors.poison();
  executable.run(device.stream());
  device.synchronize();
  return check_outputs(plan, tensors, device, seed, budget_flops);
}

namespace {

constexpr int kFewTokens = 333;  // a few tiles

// The same problem with an odd number of tokens, or null where that is no other problem or none that the plan takes. A
// hybrid keeps its share of decompressed tokens.
std::unique_ptr<KernelPlan> with_odd_tokens(const KernelEntry& entry, KernelPlan& plan) {
  Json problem = to_json(plan.problem_fields());
  const int t = problem.value("t", 1), n = problem.value("n", 0);
  if (t % 2) return nullptr;
  const int odd = std::min(t - 1, kFewTokens);
  problem["t"] = odd;
  if (n > 0) problem["n"] = n == t ? odd : std::clamp(int(std::int64_t{n} * odd / t), 1, std::max(odd - 1, 1));
  std::unique_ptr<KernelPlan> other = entry.make();
  other->target = plan.target;
  try {
    from_json(other->problem_fields(), problem);
    from_json(other->tiling_fields(), to_json(plan.tiling_fields()));
    other->validate();
  } catch (const Error&) {
    return nullptr;
  }
  return other;
}

// A hybrid's problem, whose tokens are all of one kind, with few tokens of both kinds, so that there is something to
// merge; with the default tiling, for the plan's was made for one path. Null where the problem has both, or cannot.
std::unique_ptr<KernelPlan> with_both_paths(const KernelEntry& entry, KernelPlan& plan) {
  Json problem = to_json(plan.problem_fields());
  const int n = problem.value("n", -1), t = std::min(problem.value("t", 0), kFewTokens);
  if ((n != 0 && n != problem.value("t", 0)) || t < 2) return nullptr;
  problem["t"] = t;
  for (const int between : {t / 2, t - 1, 1}) {  // a causal mask may have to end in one part
    std::unique_ptr<KernelPlan> other = entry.make();
    other->target = plan.target;
    try {
      problem["n"] = between;
      set_problem(*other, problem);
      other->validate();
      return other;
    } catch (const Error&) {
    }
  }
  return nullptr;
}

// Gives `other` the tilings of `executable`; false where it would be compiled from other sources.
bool share_kernels(Executable& other, Executable& executable) {
  const std::vector<TiledKernel*> from = executable.kernels(), to = other.kernels();
  if (from.size() != to.size()) return false;
  for (std::size_t i = 0; i < to.size(); ++i) {
    if (from[i]->header() != to[i]->header()) return false;
    to[i]->set_tiling(from[i]->tiling());
    if (to[i]->source(to[i]->tiling()).instance != from[i]->source(from[i]->tiling()).instance) return false;
  }
  return true;
}

}  // namespace

std::vector<NamedCheck> check_inputs(const KernelEntry& entry, KernelPlan& plan, Executable& executable,
                                     AllocatedTensors& tensors, const std::shared_ptr<Device>& device,
                                     Compiler& compiler, std::uint64_t seed) {
  constexpr double kFurtherFlops = 1e9;
  std::vector<NamedCheck> all = {{"random inputs", check(plan, executable, tensors, *device, seed)}};
  if (const InputRules rules = plan.input_rules(seed); rules.growing) {
    tensors.fill(seed, rules, true);
    all.push_back({"growing scores", check(plan, executable, tensors, *device, seed, kFurtherFlops)});
    tensors.fill(seed, rules, false);
  }
  if (const std::unique_ptr<KernelPlan> other = with_odd_tokens(entry, plan)) {
    AllocatedTensors odd(*other, device, seed);
    const std::unique_ptr<Executable> its = other->plan(odd.tensors());
    if (share_kernels(*its, executable)) {
      its->prepare(compiler, *device);
      all.push_back({fmt::format("t={}", to_json(other->problem_fields()).at("t").get<int>()),
                     check(*other, *its, odd, *device, seed, kFurtherFlops)});
    }
  }
  if (const std::unique_ptr<KernelPlan> other = with_both_paths(entry, plan)) {
    AllocatedTensors few(*other, device, seed);
    const std::unique_ptr<Executable> its = other->plan(few.tensors());
    its->prepare(compiler, *device);
    const Json problem = to_json(other->problem_fields());
    all.push_back({fmt::format("t={}, n={}", problem.at("t").get<int>(), problem.at("n").get<int>()),
                   check(*other, *its, few, *device, seed, kFurtherFlops)});
  }
  return all;
}

std::string to_text(const CheckResult& result) {
  std::string text;
  for (const OutputError& error : result.outputs)
    text += fmt::format("  {:<8} {}  relative error {:.2e}, worst at [{}]: got {:.6g}, expected {:.6g}\n", error.output,
                        error.passed ? "ok    " : "FAILED", error.relative_norm, fmt::join(error.worst_position, ", "),
                        error.got, error.expected);
  if (result.groups_checked < result.groups)
    text += fmt::format("  compared a random sample: {} of {} groups\n", result.groups_checked, result.groups);
  else
    text += fmt::format("  compared all {} groups\n", result.groups);
  return text;
}

}  // namespace hypermla
