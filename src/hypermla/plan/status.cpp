#include "hypermla/plan/status.h"

#include <algorithm>
#include <string_view>

#include "hypermla/base/error.h"

namespace hypermla {

int read_status(Device& device, const int* status) {
  device.synchronize();
  int bits = 0;
  device.copy_to_host(&bits, status, sizeof bits);
  return bits;
}

void check_status(const std::vector<TensorSpec>& specs, const Tensors& tensors, Device& device) {
  const auto is_status = [](const TensorSpec& spec) {
    return spec.role == Role::workspace && spec.name.substr(spec.name.rfind('.') + 1) == kPlanStatus;
  };
  const auto lengths =
      std::find_if(specs.begin(), specs.end(), [](const auto& spec) { return spec.name == "lengths"; });
  for (const TensorSpec& spec : specs) {
    if (!is_status(spec)) continue;
    if (read_status(device, static_cast<const int*>(tensors.at(spec.name).data)) & kWrongTokens)
      fail(
          "the last run had `lengths` below 0 or beyond {}, which were cut to that; mend them, or make the kernel for "
          "more",
          lengths->most);
  }
}

}  // namespace hypermla
