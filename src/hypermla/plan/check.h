// --check: a kernel's outputs against the plan's reference.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hypermla/plan/inputs.h"

namespace hypermla {

// How far an output may be from the reference. An element fails when not |got - expected| <= elementwise * (|expected|
// + rms), rms being the root mean square of the expected elements of its group; an output fails when not ||got -
// expected|| <= norm * ||expected||. Infinities must agree exactly, and NaN never passes.
struct Tolerance {
  double elementwise = 0;
  double norm = 0;
};
// bfloat16 keeps 8 bits and the weights of the softmax are rounded to it as well: a correct kernel differs by 2e-3 of
// the norm, for any shape. The log-sum-exp is fp32.
Tolerance tolerance(DType output, DType computed_in);

struct OutputError {
  std::string output;
  double relative_norm = 0;  // ||got - expected|| / ||expected|| over all compared elements
  double worst = 0;          // largest |got - expected| / (|expected| + rms)
  std::vector<std::int64_t> worst_position;
  double got = 0, expected = 0;  // there
  bool passed = false;
};

struct CheckResult {
  bool passed = false;
  std::int64_t groups = 0, groups_checked = 0;
  std::vector<OutputError> outputs;
};

// Compares the present contents of the output tensors. All groups are compared if the reference needs at most
// `budget_flops`; otherwise a sample drawn from `seed`, which always includes the first and the last group. Uses all
// cores.
CheckResult check_outputs(const KernelPlan& plan, const AllocatedTensors& tensors, Device& device, std::uint64_t seed,
                          double budget_flops = 4e9);

// Poisons, runs once, compares.
CheckResult check(const KernelPlan& plan, Executable& executable, AllocatedTensors& tensors, Device& device,
                  std::uint64_t seed, double budget_flops = 4e9);

// One line for each output, and one that says how many groups were compared.
std::string to_text(const CheckResult& result);

}  // namespace hypermla
