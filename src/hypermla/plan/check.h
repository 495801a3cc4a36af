// --check: a kernel's outputs against the plan's reference.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hypermla/plan/inputs.h"
#include "hypermla/plan/registry.h"

namespace hypermla {

// What the arithmetic of a correct kernel loses (docs/checking.md), in units u of half a last place: 2^-9 relative for
// bfloat16, 2^-11 for float16, 2^-24 for fp32.
//
//   16 bits  The output, the weights of the softmax and the partial outputs of a merge are each rounded once, by
//            at most 1 u: 3 u of the norm. An element may be made of values of four times the row's rms: 12 u. Near
//            zero a step does not shrink any more: half of one besides.
//   fp32     A score is a sum of up to 576 products. A tensor core adds 16 of them at a time. Each of 36 steps cuts
//            off up to 2 u of a sum that on average is half grown: 18 u of the reach where all products have one sign,
//            a quarter of that for random ones. The exponentials, the sum of the weights and the logarithm add some u
//            of 1 + |lse|. Allowed are 32 u of 1 + |lse| + reach.
Tolerance tolerance(DType output, DType computed_in);

struct OutputError {
  std::string output;
  // Of differences without Tolerance::rounding: their norm over that of what is expected, of all compared elements; and
  // the largest of them over |expected| + scale. Of NaN both are infinite, so that a largest of several finds it.
  double relative_norm = 0, worst = 0;
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

// The same of outputs that no plan has.
struct ComparedOutput {
  std::string name;
  DType dtype;
  std::vector<std::int64_t> shape;
  Tolerance allowed;
  // Elements [first, first + count). Any thread may call it.
  std::function<std::vector<float>(std::int64_t first, std::int64_t count)> read;

  std::int64_t elements() const { return Tensor{nullptr, dtype, shape}.elements(); }
};
CheckResult compare_outputs(const ReferenceShape& shape, const std::vector<ComparedOutput>& outputs,
                            const std::function<ReferenceOutputs(std::int64_t group)>& reference, std::uint64_t seed,
                            double budget_flops);

// Poisons, runs once, compares.
CheckResult check(const KernelPlan& plan, Executable& executable, AllocatedTensors& tensors, Device& device,
                  std::uint64_t seed, double budget_flops = 4e9);

// What --check compares, each with the name of its inputs. Leaves the inputs as they were.
struct NamedCheck {
  std::string inputs;
  CheckResult result;
};
// The inputs as they are. Where the plan can have them, scores that grow along the tokens: a running maximum must
// follow, and the newest tokens, which a causal mask hides, weigh most. And an odd number of tokens, at most 333, so
// that one token too many shows in the log-sum-exp; left out where t is odd, and where the kernels would have to be
// compiled anew. And of a hybrid whose tokens are all latent or all decompressed a problem with some of both, for which
// kernels are compiled where that is needed: that problem shows the merge.
std::vector<NamedCheck> check_inputs(const KernelEntry& entry, KernelPlan& plan, Executable& executable,
                                     AllocatedTensors& tensors, const std::shared_ptr<Device>& device,
                                     Compiler& compiler, std::uint64_t seed);

// One line for each output, and one that says how many groups were compared.
std::string to_text(const CheckResult& result);

}  // namespace hypermla
