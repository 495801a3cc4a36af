#include "hypermla/plan/executable.h"

#include <algorithm>
#include <cctype>
#include <cmath>

namespace hypermla {

void TiledKernel::set_tiling(const Json& tiling) { tiling_ = normalize_(tiling); }

double TiledKernel::predict_seconds(const Json& tiling, const DeviceSpec& device, DType dtype) const {
  const double blocks = launch_(tiling).grid.blocks();
  if (blocks == 0) return 0;
  const double processors = std::max(device.sm_count, 1);
  const double waves = blocks / processors;
  return hypermla::predict(executed_(tiling), device, dtype).seconds * std::ceil(waves) / waves;
}

void TiledKernel::prepare(Compiler& compiler, Device& device) {
  entry_ = compiler.compile(source(tiling_), device.info().arch);
  const KernelLaunch launch = launch_(tiling_);
  if (loaded_ != entry_->dir.string() || loaded_shape_ != launch.shape) {
    function_ = device.load(entry_->path(entry_->report.at("artifact")), entry_->report.at("function"), launch.shape);
    loaded_ = entry_->dir.string();
    loaded_shape_ = launch.shape;
  }
  if (!launch.constants.empty()) {
    constants_ = Buffer(device.shared_from_this(), launch.constants.size());
    device.copy_to_device(constants_.data(), launch.constants.data(), launch.constants.size());
  }
  packed_ = launch.arguments(constants_.data());
  pointers_ = packed_.pointers();
  packed_grid_ = launch.grid;
}

std::vector<TiledKernel*> KernelPipeline::kernels() {
  std::vector<TiledKernel*> all;
  for (auto& stage : stages_)
    for (TiledKernel* kernel : stage->kernels()) all.push_back(kernel);
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

std::vector<TiledKernel*> launched_kernels(Executable& executable) {
  std::vector<TiledKernel*> kernels = executable.kernels();
  std::erase_if(kernels, [](const TiledKernel* kernel) { return kernel->grid().blocks() == 0; });
  return kernels;
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
