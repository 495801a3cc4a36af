// --check: a kernel's outputs against the plan's reference.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hypermla/plan/inputs.h"

namespace hypermla {

// How far an output may be from the reference. An element fails when not |got - expected| <= elementwise * (|expected| +
// rms), rms being the root mean square of the expected elements of its group; an output fails when not
// ||got - expected|| <= norm * ||expected||. Infinities must agree exactly, and NaN never passes.
struct Tolerance {
  double elementwise = 0;
  double norm = 0;
};
// bfloat16 keeps 8 bits and the weights of the softmax are rounded to it as well: 2e-3 of the norm is what a right kernel
// shows, whatever the shape. The log-sum-exp is fp32.
Tolerance tolerance(DType output, DType computed_in);

struct OutputError {
  std::string output;
  double relative_norm = 0;       // ||got - expected|| / ||expected|| over what was compared
  double worst = 0;               // largest |got - expected| / (|expected| + rms)
  std::vector<std::int64_t> worst_position;
  double got = 0, expected = 0;   // there
  bool passed = false;
};

struct CheckResult {
  bool passed = false;
  std::int64_t groups = 0, groups_checked = 0;
  std::vector<OutputError> outputs;
};

// Compares what is in the output tensors now. Groups are all compared while the reference stays below `budget_flops`;
// beyond, a sample drawn from `seed` that always has the first and the last group. Uses all cores.
CheckResult check_outputs(const KernelPlan& plan, const AllocatedTensors& tensors, Device& device, std::uint64_t seed,
                          double budget_flops = 4e9);

// Poisons, runs once, compares.
CheckResult check(const KernelPlan& plan, Executable& executable, AllocatedTensors& tensors, Device& device,
                  std::uint64_t seed, double budget_flops = 4e9);

// One line an output, and one that says how much was compared.
std::string to_text(const CheckResult& result);

}  // namespace hypermla
