// A kernel of the registry as a stage of another plan: a pipeline is planned from names, so that no version's sources include
// another's.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hypermla/plan/plan.h"

namespace hypermla {

class Stage {
 public:
  // `kernel` and `version` as Registry::find() takes them. Of `problem` the stage takes the fields that it has. A tensor of the
  // stage is the outer plan's of that name, or of the name that `names` gives it; a workspace is called "<prefix>.<its name>".
  // Where several languages have the kernel, the first that recommends itself. Throws Error as validate() of the stage does.
  Stage(const std::string& kernel, const std::string& version, const Target& target, const Json& problem,
        std::string prefix, std::map<std::string, std::string> names = {});

  // What the outer plan has to offer on top of its own tensors.
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
