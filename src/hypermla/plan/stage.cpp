#include "hypermla/plan/stage.h"

#include <algorithm>

namespace hypermla {

Stage::Stage(const std::vector<KernelEntry>& versions, const PlannedDevice& on, const Json& problem, std::string prefix,
             std::map<std::string, std::string> names)
    : plan_(configure(versions, on, {.offered = problem}).plan), prefix_(std::move(prefix)), names_(std::move(names)) {}

std::string Stage::outer_name(const TensorSpec& spec) const {
  if (spec.role == Role::workspace) return prefix_ + "." + spec.name;
  const auto found = names_.find(spec.name);
  return found == names_.end() ? spec.name : found->second;
}

std::vector<TensorSpec> Stage::workspaces() const {
  std::vector<TensorSpec> all = plan_->tensors();
  std::erase_if(all, [](const TensorSpec& spec) { return spec.role != Role::workspace; });
  for (TensorSpec& spec : all) spec.name = outer_name(spec);
  return all;
}

std::unique_ptr<Executable> Stage::plan(const Tensors& outer) const {
  Tensors own;
  for (const TensorSpec& spec : plan_->tensors())
    own[spec.name] = {outer.at(outer_name(spec)).data, spec.dtype, spec.shape};
  return plan_->plan(own);
}

}  // namespace hypermla
