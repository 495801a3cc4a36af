#include "hypermla/plan/executable.h"

#include <algorithm>
#include <cctype>
#include <cmath>

namespace hypermla {

void CtKernel::set_tiling(const Json& tiling) { tiling_ = normalize_(tiling); }

double CtKernel::predict_seconds(const Json& tiling, const DeviceSpec& device, DType dtype) const {
  const double blocks = grid_(tiling).blocks();
  const double processors = std::max(device.sm_count, 1);
  const double waves = blocks / processors;
  return hypermla::predict(executed_(tiling), device, dtype).seconds * std::ceil(waves) / waves;
}

void CtKernel::prepare(Compiler& compiler, Device& device) {
  entry_ = compiler.compile(source(tiling_), device.info().arch);
  if (loaded_ != entry_->dir.string()) {
    function_ = device.load(entry_->path(entry_->report.at("artifact")), entry_->report.at("function"));
    loaded_ = entry_->dir.string();
  }
  packed_ = arguments_(tiling_);
  pointers_ = packed_.pointers();
  packed_grid_ = grid_(tiling_);
}

std::vector<CtKernel*> KernelPipeline::kernels() {
  std::vector<CtKernel*> all;
  for (auto& stage : stages_)
    for (CtKernel* kernel : stage->kernels()) all.push_back(kernel);
  return all;
}

Cost KernelPipeline::cost() const {
  Cost total;
  for (const auto& stage : stages_) total += stage->cost();
  return total;
}

Prediction KernelPipeline::predict(const DeviceSpec& device, DType dtype) const {
  Prediction total;
  for (const auto& stage : stages_) {
    const Prediction one = stage->predict(device, dtype);
    total.seconds += one.seconds;
    total.compute_seconds += one.compute_seconds;
    total.memory_seconds += one.memory_seconds;
  }
  total.bound = total.compute_seconds > total.memory_seconds ? Bound::compute : Bound::memory;
  return total;
}

std::string camel_case(const std::string& snake_case) {
  std::string result;
  bool upper = true;
  for (char c : snake_case) {
    if (c != '_') result += upper ? char(std::toupper(static_cast<unsigned char>(c))) : c;
    upper = c == '_';
  }
  return result;
}

}  // namespace hypermla
