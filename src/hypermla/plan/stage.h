// A kernel of the registry as a stage of another plan. Pipelines name their kernels, so no version includes another.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hypermla/plan/configure.h"

namespace hypermla {

class Stage {
 public:
  // That one of `versions` which configure() takes, with those values of `problem` whose field it has. A tensor of the
  // stage is the tensor of the outer plan with the same name, or with the name that `names` gives it; a workspace is
  // called "<prefix>.<its name>". Throws Error as validate() of the stage does.
  Stage(const std::vector<KernelEntry>& versions, const PlannedDevice& on, const Json& problem, std::string prefix,
        std::map<std::string, std::string> names = {});

  // Workspace that the outer plan must offer to the stage, in addition to its own tensors.
  std::vector<TensorSpec> workspaces() const;
  // Over the outer plan's tensors.
  std::unique_ptr<Executable> plan(const Tensors& outer) const;

 private:
  std::string outer_name(const TensorSpec& spec) const;

  std::shared_ptr<KernelPlan> plan_;
  std::string prefix_;
  std::map<std::string, std::string> names_;
};

}  // namespace hypermla
