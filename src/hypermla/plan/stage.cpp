#include "hypermla/plan/stage.h"

#include <algorithm>

#include "hypermla/plan/configure.h"

namespace hypermla {

Stage::Stage(const std::string& kernel, const std::string& version, const Target& target, const Json& problem,
             std::string prefix, std::map<std::string, std::string> names)
    : prefix_(std::move(prefix)), names_(std::move(names)) {
  const std::vector<KernelEntry> entries = Registry::instance().find_all(kernel, version, target.arch);
  plan_ = configure(entries, {target, {}}, {.offered = problem}).plan;
}

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
