#include "hypermla/plan/check.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace hypermla {
namespace {

struct GroupError {
  double difference_squared = 0, expected_squared = 0;
  double worst = -1;
  std::int64_t worst_index = 0;  // within the group
  double got = 0, expected = 0;
  bool passed = true;
};

GroupError compare(const std::vector<float>& got, const std::vector<double>& expected, double tolerance) {
  GroupError error;
  double finite_squared = 0;
  for (double value : expected)
    if (std::isfinite(value)) finite_squared += value * value;
  const double rms = std::sqrt(finite_squared / double(expected.size()));
  error.expected_squared = finite_squared;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    double excess;  // relative to what is allowed to differ
    if (std::isfinite(expected[i])) {
      const double difference = double(got[i]) - expected[i];
      error.difference_squared += difference * difference;
      excess = difference == 0 ? 0 : std::fabs(difference) / (std::fabs(expected[i]) + rms);
    } else {
      excess = double(got[i]) == expected[i] ? 0 : HUGE_VAL;  // infinities agree or not
    }
    if (!(excess <= tolerance)) error.passed = false;  // NaN fails
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
  if (output == DType::float32) return {2e-3, 1e-3};
  return computed_in == DType::float16 ? Tolerance{5e-3, 1e-3} : Tolerance{4e-2, 6e-3};
}

CheckResult check_outputs(const KernelPlan& plan, const AllocatedTensors& tensors, Device& device, std::uint64_t seed,
                          double budget_flops) {
  const ReferenceShape shape = plan.reference_shape();
  const std::vector<std::int64_t> groups = choose_groups(shape, seed, budget_flops);
  struct Total {
    GroupError error;
    std::int64_t worst_group = 0;
  };
  std::map<std::string, Total> totals;
  std::mutex mutex;
  std::atomic<std::size_t> next{0};
  std::exception_ptr failure;
  const InputReader reader = tensors.reader();
  auto work = [&] {
    try {
      for (std::size_t i; (i = next++) < groups.size();) {
        const std::int64_t group = groups[i];
        for (const auto& [name, expected] : plan.reference(group, reader)) {
          const Tensor& output = tensors.tensors().at(name);
          const std::int64_t count = output.elements() / shape.groups;
          if (std::int64_t(expected.size()) != count)
            fail("the reference of this plan makes {} elements of {} in a group, not {}", expected.size(), name, count);
          const GroupError error = compare(read_floats(device, output, group * count, count), expected,
                                           tolerance(output.dtype, plan.dtype()).elementwise);
          std::lock_guard lock(mutex);
          Total& total = totals[name];
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
  for (const TensorSpec& spec : plan.tensors()) {
    if (spec.role != Role::output) continue;
    if (!totals.count(spec.name)) fail("the reference of this plan does not make its output {}", spec.name);
    const Total& total = totals[spec.name];
    const Tensor& output = tensors.tensors().at(spec.name);
    OutputError error;
    error.output = spec.name;
    error.relative_norm = total.error.expected_squared > 0
                              ? std::sqrt(total.error.difference_squared / total.error.expected_squared)
                              : std::sqrt(total.error.difference_squared);
    error.worst = total.error.worst;
    error.worst_position =
        unravel(total.worst_group * (output.elements() / shape.groups) + total.error.worst_index, output.shape);
    error.got = total.error.got;
    error.expected = total.error.expected;
    error.passed = total.error.passed && error.relative_norm <= tolerance(output.dtype, plan.dtype()).norm;
    result.passed &= error.passed;
    result.outputs.push_back(error);
  }
  return result;
}

CheckResult check(const KernelPlan& plan, Executable& executable, AllocatedTensors& tensors, Device& device,
                  std::uint64_t seed, double budget_flops) {
  tensors.poison();
  executable.run(device.stream());
  device.synchronize();
  return check_outputs(plan, tensors, device, seed, budget_flops);
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
