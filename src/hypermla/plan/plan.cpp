#include "hypermla/plan/plan.h"

namespace hypermla {

Target Target::of_arch(const std::string& arch) {
  static const std::map<std::string, int> kProcessors = {{"sm_80", 108},  {"sm_86", 84},   {"sm_89", 128},
                                                         {"sm_90", 132},  {"sm_100", 148}, {"sm_103", 148},
                                                         {"sm_120", 170}, {"sm_121", 48}};
  const auto found = kProcessors.find(arch);
  if (found == kProcessors.end()) {
    std::vector<std::string> known = {"cpu"};
    for (const auto& [name, processors] : kProcessors) known.push_back(name);
    fail("unknown target '{}'; choose one of {}", arch, fmt::join(known, ", "));
  }
  return {arch, found->second};
}

std::string_view path_name(Path path) {
  constexpr std::string_view kNames[] = {"none", "latent", "decompressed", "hybrid", "shared prefix"};
  return kNames[int(path)];
}

TimeEstimate KernelPlan::time(const Ceilings&) const {
  fail("this kernel has no figures: it cannot be set against others");
}

Tensors empty_tensors(const KernelPlan& plan) {
  Tensors tensors;
  for (const TensorSpec& spec : plan.tensors()) tensors[spec.name] = {nullptr, spec.dtype, spec.shape};
  return tensors;
}

std::string problem_key(KernelPlan& plan) {
  std::string key;
  for (const FieldRef& field : plan.problem_fields()) {
    if (!key.empty()) key += '_';
    if (std::holds_alternative<DType*>(field.value))
      key += field.text();
    else
      key += std::string(field.name) + (std::holds_alternative<bool*>(field.value) ? "=" : "") + field.text();
  }
  return key;
}

}  // namespace hypermla
