#include "hypermla/plan/plan.h"

#include "hypermla/plan/check.h"

namespace hypermla {

Target Target::of_arch(const std::string& arch) {
  const int processors = architecture(arch).processors;
  if (!processors) {
    std::vector<std::string_view> known = {"cpu"};
    for (const Architecture& one : architectures()) known.push_back(one.name);
    fail("unknown target '{}'; choose one of {}", arch, fmt::join(known, ", "));
  }
  return {arch, processors};
}

std::string_view path_name(Path path) {
  constexpr std::string_view kNames[] = {"none", "latent", "decompressed", "hybrid", "shared prefix"};
  return kNames[int(path)];
}

TimeEstimate KernelPlan::time(const Ceilings&) const {
  fail("this kernel has no figures: it cannot be set against others");
}

Tolerance KernelPlan::allowed(DType output) const { return tolerance(output, dtype()); }

void require_indices(const std::vector<TensorSpec>& specs, const Tensors& tensors) {
  for (const TensorSpec& spec : specs) {
    const auto* values = static_cast<const std::int32_t*>(tensors.at(spec.name).data);
    if (spec.dtype != DType::int32 || spec.role != Role::input || spec.most < 0 || !values) continue;
    for (std::int64_t i = 0; i < tensors.at(spec.name).elements(); ++i)
      if (values[i] < 0 || values[i] > spec.most)
        fail("{}[{}] is {}; it must be from 0 to {}", spec.name, i, values[i], spec.most);
  }
}

Tensors empty_tensors(const KernelPlan& plan) {
  Tensors tensors;
  for (const TensorSpec& spec : plan.tensors()) tensors[spec.name] = {nullptr, spec.dtype, spec.shape};
  return tensors;
}

double tensor_bytes(const KernelPlan& plan) {
  double bytes = 0;
  for (const TensorSpec& spec : plan.tensors()) {
    double tensor = dtype_bytes(spec.dtype);
    for (const std::int64_t extent : spec.shape) tensor *= double(extent);
    bytes += tensor;
  }
  return bytes;
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

std::string run_text(KernelPlan& plan, Executable& executable) {
  std::string text = problem_key(plan) + "\n";
  for (const TiledKernel* kernel : executable.kernels())
    text += fmt::format("  {} {}\n", kernel->name(), kernel->tiling().dump());
  return text;
}

}  // namespace hypermla
