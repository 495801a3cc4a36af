#include "hypermla/plan/executable.h"

#include <cxxabi.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "hypermla/base/error.h"

namespace hypermla {

void TiledKernel::set_tiling(const Json& tiling) { tiling_ = normalize_(tiling); }

Prediction TiledKernel::predict(const Cost& cost, const DeviceSpec& device, DType dtype) const {
  Prediction prediction = hypermla::predict(cost, device, dtype);
  if (processors_ == 0 || processors_ >= device.sm_count) return prediction;
  prediction.compute_seconds *= double(device.sm_count) / processors_;
  prediction.seconds = std::max(prediction.compute_seconds, prediction.memory_seconds);
  prediction.bound = prediction.compute_seconds > prediction.memory_seconds ? Bound::compute : Bound::memory;
  return prediction;
}

double TiledKernel::predict_seconds(const Json& tiling, const DeviceSpec& device, DType dtype) const {
  const double blocks = launch_(tiling).grid.blocks();
  if (blocks == 0) return 0;
  const double processors = std::max(processors_ ? std::min(processors_, device.sm_count) : device.sm_count, 1);
  const double waves = blocks / processors;
  return predict(executed_(tiling), device, dtype).seconds * std::ceil(waves) / waves;
}

std::unique_ptr<Function> load(Device& device, const CacheEntry& entry, const LaunchShape& shape) {
  return device.load(entry.path(entry.report.at("artifact")), entry.report.at("function"), shape);
}

std::vector<std::unique_ptr<Function>> load_all(Compiler& compiler, Device& device,
                                                const std::vector<KernelSource>& sources,
                                                const std::vector<LaunchShape>& shapes) {
  std::vector<std::shared_future<CacheEntry>> entries;
  for (const KernelSource& source : sources) entries.push_back(compiler.compile_ahead(source, device.info().arch));
  std::vector<std::unique_ptr<Function>> functions;
  for (std::size_t i = 0; i < entries.size(); ++i)
    functions.push_back(load(device, entries[i].get(), i < shapes.size() ? shapes[i] : LaunchShape()));
  return functions;
}

void TiledKernel::prepare(Compiler& compiler, Device& device) {
  entry_ = compiler.compile(source(tiling_), device.info().arch);
  KernelLaunch launch = launch_(tiling_);
  if (after_all_) launch.shape.overlaps_previous = false;
  if (loaded_ != entry_->dir.string() || loaded_shape_ != launch.shape) {
    function_ = load(device, *entry_, launch.shape);
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

namespace {

using Parts = std::vector<std::unique_ptr<Executable>>;

std::vector<TiledKernel*> kernels_of(const Parts& parts) {
  std::vector<TiledKernel*> all;
  for (auto& part : parts)
    for (TiledKernel* kernel : part->kernels()) all.push_back(kernel);
  return all;
}

Cost cost_of(const Parts& parts) {
  Cost total;
  for (const auto& part : parts) total += part->cost();
  return total;
}

void start_after_all(Executable& executable) {
  const std::vector<TiledKernel*> kernels = executable.kernels();
  if (!kernels.empty()) kernels.front()->start_after_all();
}

}  // namespace

KernelPipeline::KernelPipeline(std::string name, Parts stages)
    : Executable(std::move(name)), stages_(std::move(stages)) {
  for (std::size_t i = 1; i < stages_.size(); ++i)
    if (!stages_[i - 1]->groups().empty()) start_after_all(*stages_[i]);
}

std::vector<TiledKernel*> KernelPipeline::kernels() { return kernels_of(stages_); }

std::vector<ConcurrentKernels*> KernelPipeline::groups() {
  std::vector<ConcurrentKernels*> all;
  for (auto& stage : stages_)
    for (ConcurrentKernels* group : stage->groups()) all.push_back(group);
  return all;
}

Cost KernelPipeline::cost() const { return cost_of(stages_); }

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

ConcurrentKernels::ConcurrentKernels(std::string name, Parts members, JointValidation validate_joint_tiling,
                                     std::vector<int> partition)
    : Executable(std::move(name)),
      members_(std::move(members)),
      validate_joint_tiling_(std::move(validate_joint_tiling)),
      partition_(std::move(partition)) {
  for (auto& member : members_) start_after_all(*member);
  if (partition_.empty()) return;
  if (partition_.size() != members_.size())
    fail("{} has {} members and {} partitions; give one partition a member, or none", this->name(), members_.size(),
         partition_.size());
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (partition_[i] < 1)
      fail("{} gives {} a partition of {} SMs; give it one", this->name(), members_[i]->name(), partition_[i]);
    for (const ConcurrentKernels* group : members_[i]->groups())
      if (!group->partition_.empty())
        fail("{} in a partition of {} is divided once more; divide only one of them", group->name(), this->name());
    for (TiledKernel* kernel : members_[i]->kernels()) kernel->confine(partition_[i]);
  }
}

void ConcurrentKernels::prepare(Compiler& compiler, Device& device) {
  validate_tilings();
  if (!streams_)
    streams_ = outer_ ? outer_->inside(outer_member_, members_.size()) : device.streams(members_.size(), partition_);
  if (outer_ || !partition_.empty())
    for (std::size_t i = 0; i < members_.size(); ++i)
      for (ConcurrentKernels* group : members_[i]->groups()) group->run_inside(*streams_, i);
  for (auto& member : members_) member->prepare(compiler, device);
}

std::vector<TiledKernel*> ConcurrentKernels::kernels() { return kernels_of(members_); }

void ConcurrentKernels::validate_tilings() {
  for (auto& member : members_) member->validate_tilings();
  if (validate_joint_tiling_) validate_joint_tiling_(kernels());
}

Cost ConcurrentKernels::cost() const { return cost_of(members_); }

Prediction ConcurrentKernels::predict(const DeviceSpec& device, DType dtype) const {
  Prediction joint = hypermla::predict(cost(), device, dtype);
  for (const auto& member : members_) joint.seconds = std::max(joint.seconds, member->predict(device, dtype).seconds);
  return joint;
}

void require_resident_blocks(const std::vector<TiledKernel*>& kernels, int processors) {
  double needed = 0;  // SMs
  std::string who;
  for (const TiledKernel* kernel : kernels) {
    const double blocks = kernel->grid().blocks();
    const int resident = std::max(1, kernel->tiling().value("occupancy", 1));
    if (kernel->processors() > 0 && blocks > double(kernel->processors()) * resident)
      fail("{} has {} blocks, but its partition of {} SMs holds {}; give it fewer blocks or more SMs", kernel->name(),
           blocks, kernel->processors(), kernel->processors() * resident);
    needed += kernel->processors() > 0 ? kernel->processors() : blocks / resident;
    who += fmt::format("{}{} {}", who.empty() ? "" : " and ", blocks, kernel->name());
  }
  if (needed > processors)
    fail("the blocks of {} need {} SMs at once, and there are {}; lower their budgets", who, std::ceil(needed),
         processors);
}

std::vector<TiledKernel*> launched_kernels(Executable& executable) {
  std::vector<TiledKernel*> kernels = executable.kernels();
  std::erase_if(kernels, [](const TiledKernel* kernel) { return kernel->grid().blocks() == 0; });
  return kernels;
}

std::vector<ConcurrentKernels*> launched_groups(Executable& executable) {
  std::vector<ConcurrentKernels*> groups = executable.groups();
  std::erase_if(groups, [](ConcurrentKernels* group) { return launched_kernels(*group).size() < 2; });
  return groups;
}

std::string type_name(const std::type_info& type) {
  const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(type.name(), nullptr, nullptr, nullptr),
                                                         &std::free);
  return name.get();
}

}  // namespace hypermla
