#include "hypermla/mla_cache.h"

#include "hypermla/api/shared.h"
#include "hypermla/plan/cache_ops.h"
#include "hypermla/plan/typed_plan.h"

namespace hypermla {

struct MlaCacheOps::State {
  std::shared_ptr<Device> device;
  std::unique_ptr<CacheKernels> kernels;
};

MlaCacheOps::MlaCacheOps(DType dtype, const DeviceHandle& device) : state_(std::make_unique<State>()) {
  require_half_precision(dtype, "dtype");
  state_->device = device.device_;
  state_->kernels = state_->device->is_gpu() ? make_cache_kernels(dtype, shared().compiler, *state_->device)
                                             : make_cache_reference(dtype, *state_->device);
}
MlaCacheOps::~MlaCacheOps() = default;
MlaCacheOps::MlaCacheOps(MlaCacheOps&&) noexcept = default;
MlaCacheOps& MlaCacheOps::operator=(MlaCacheOps&&) noexcept = default;

void MlaCacheOps::merge_states(const Merge& with, void* stream) {
  validate(with);
  if (with.tokens && with.heads) state_->kernels->merge_states(with, stream);
}

void MlaCacheOps::append(const Append& with, void* stream) {
  validate(with);
  if (with.tokens) state_->kernels->append(with, stream);
}

void MlaCacheOps::decompress_prefix(const Decompress& with, void* stream) {
  validate(with);
  if (with.tokens && with.heads) state_->kernels->decompress_prefix(with, stream);
}

void MlaCacheOps::split_prefixes(const Split& with, void* stream) {
  validate(with);
  if (with.requests || with.count) state_->kernels->split_prefixes(with, stream);
}

}  // namespace hypermla
