// Memory for a plan's tensors: random inputs, poisoned outputs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hypermla/device/device.h"
#include "hypermla/plan/plan.h"

namespace hypermla {

// Throws Error when the tensors of a plan need more memory than the device has. Memory that is promised but not there
// would end the process later.
void require_memory(const KernelPlan& plan, const DeviceInfo& info);

class AllocatedTensors {
 public:
  // Allocates every tensor of the plan. Inputs are standard normal numbers rounded to their type, drawn from `seed`.
  // They repeat with a prime period of about a million and start at another place in every tensor, so that an index
  // error changes results. Then the plan's InputRules are applied; `growing` asks for scores that grow along the
  // tokens.
  AllocatedTensors(const KernelPlan& plan, std::shared_ptr<Device> device, std::uint64_t seed, bool growing = false)
      : AllocatedTensors(plan.tensors(), std::move(device), seed, plan.input_rules(seed), growing) {}
  // The same for tensors without a plan.
  AllocatedTensors(std::vector<TensorSpec> specs, std::shared_ptr<Device> device, std::uint64_t seed,
                   const InputRules& rules = {}, bool growing = false);

  const Tensors& tensors() const { return tensors_; }
  // Draws the inputs anew, as the constructor does, and poisons.
  void fill(std::uint64_t seed, const InputRules& rules, bool growing);
  // Fills outputs and workspace with NaN, so that an element that is never written cannot pass the check.
  void poison();
  InputReader reader() const;

 private:
  std::shared_ptr<Device> device_;
  std::vector<TensorSpec> specs_;
  std::vector<Buffer> buffers_;
  Tensors tensors_;
};

// Elements [first, first + count) of a tensor on a device, as float (an int32 below 2^24 is exact). Any thread may call
// it.
std::vector<float> read_floats(Device& device, const Tensor& tensor, std::int64_t first, std::int64_t count);

// Rounds to nearest even, as the hardware does; the bits of the 16-bit type.
std::uint16_t to_half_bits(float value, DType dtype);
float from_half_bits(std::uint16_t bits, DType dtype);

}  // namespace hypermla
