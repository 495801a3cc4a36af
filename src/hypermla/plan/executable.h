// What a plan builds and a stream runs: kernels, and compositions of kernels that are executables again.
//
//   CtKernel           one CUDA Tile C++ kernel with a tiling
//   CuteKernel         one CUDA C++ kernel for Hopper with a tiling
//   KernelPipeline     stages in order, each depending on the ones before
//   ConcurrentKernels  members that run at once, each on its own stream
//
// An executable is built without compiling anything, so that predictions need neither tensors nor compilers. prepare()
// compiles and loads; run() then only launches: it neither allocates, nor synchronises, nor reads back, and may be
// captured in a CUDA graph.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <vector>

#include "hypermla/compile/compiler.h"
#include "hypermla/device/device.h"
#include "hypermla/device/tensor_map.h"
#include "hypermla/roofline/roofline.h"

namespace hypermla {

class TiledKernel;
class ConcurrentKernels;

// What was compiled, on a device.
std::unique_ptr<Function> load(Device& device, const CacheEntry& entry, const LaunchShape& shape = {});
// Kernels that are found in the cache, or compiled side by side. `shapes`: of each, where they do not choose their own.
std::vector<std::unique_ptr<Function>> load_all(Compiler& compiler, Device& device,
                                                const std::vector<KernelSource>& sources,
                                                const std::vector<LaunchShape>& shapes = {});

class Executable {
 public:
  explicit Executable(std::string name) : name_(std::move(name)) {}
  virtual ~Executable() = default;

  const std::string& name() const { return name_; }
  // Compiles what the present tilings need, loads it and packs the arguments. Call again after a tiling changed.
  virtual void prepare(Compiler& compiler, Device& device) = 0;
  virtual void run(StreamHandle stream) = 0;
  // All kernels, in launch order; the tuner and the profilers walk them.
  virtual std::vector<TiledKernel*> kernels() = 0;
  // What runs at once in it: the outermost groups; the profilers measure each as one.
  virtual std::vector<ConcurrentKernels*> groups() { return {}; }
  // Throws Error when the present tilings do not go together. prepare() asks first.
  virtual void validate_tilings() {}
  // The algorithm's work, without what a tiling adds.
  virtual Cost cost() const = 0;
  virtual Prediction predict(const DeviceSpec& device, DType dtype) const = 0;

 private:
  std::string name_;
};

// Kernel arguments by value, of any type that is copied byte by byte: pointers, numbers, structs.
class Arguments {
 public:
  template <class... Ts>
  explicit Arguments(const Ts&... values) {
    values_.reserve(sizeof...(values));
    pointers_.reserve(sizeof...(values));
    (add(values), ...);
  }
  // Bytes of each.
  std::vector<int> sizes() const {
    std::vector<int> all;
    for (const std::string& value : values_) all.push_back(int(value.size()));
    return all;
  }
  // As the driver wants them: a pointer to each.
  void** pointers() {
    pointers_.clear();
    for (std::string& value : values_) pointers_.push_back(value.data());
    return pointers_.data();
  }

 private:
  template <class T>
  void add(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    values_.emplace_back(reinterpret_cast<const char*>(&value), sizeof value);
  }
  std::vector<std::string> values_;
  std::vector<void*> pointers_;
};

// How one kernel follows from its tiling, in both languages. `Tiling` is a struct with a field list
// (base/fields.h).
template <class Problem, class Tiling>
struct KernelSpec {
  std::string name;    // of the kernel template and of its files
  std::string header;  // below the kernel root
  Problem problem;     // as the kernel sees it: what it learns at run time is 0
  Tiling tiling;
  std::vector<Tiling> candidates;               // for the tuner; legal for the problem
  Cost cost;                                    // the algorithm's work
  std::function<Cost(const Tiling&)> executed;  // with padded rows and repeated reads: orders the candidates
  // The tiling as a template argument, where the kernel learns some of its fields at run time; null: all of it.
  std::function<Tiling(Tiling)> at_compile_time;
};

// A kernel that chooses its threads and its shared memory itself.
template <class Problem, class Tiling>
struct CtKernelSpec : KernelSpec<Problem, Tiling> {
  std::function<Grid(const Tiling&)> grid;
  std::function<Arguments(const Tiling&)> arguments;
};

// One launch of a kernel. A grid without blocks: nothing is to be done.
struct KernelLaunch {
  Grid grid;
  LaunchShape shape;
  std::string constants;  // bytes that the kernel reads, copied to the device once: a work list made on the host
  std::function<Arguments(void* constants)> arguments;
};
template <class Problem, class Tiling>
struct CuteKernelSpec : KernelSpec<Problem, Tiling> {
  std::function<KernelLaunch(const Tiling&)> launch;
};

// One kernel with a tiling that the tuner may change.
class TiledKernel : public Executable {
 public:
  const Json& tiling() const { return tiling_; }
  void set_tiling(const Json& tiling);  // throws Error when it names an unknown field
  const std::vector<Json>& candidates() const { return candidates_; }
  // The source for a tiling, without compiling it, and what it is passed.
  KernelSource source(const Json& tiling) const {
    return {name(), header_, instance_(tiling), launch_(tiling).arguments(nullptr).sizes()};
  }
  const std::string& header() const { return header_; }
  // Roofline time of what a tiling really executes, in whole waves over the device's processors.
  double predict_seconds(const Json& tiling, const DeviceSpec& device, DType dtype) const;
  Grid grid() const { return launch_(tiling_).grid; }
  LaunchShape shape() const { return launch_(tiling_).shape; }
  // Of the last prepare(): registers, frame_bytes, ...; and where its files are.
  const CacheEntry& entry() const { return *entry_; }
  bool prepared() const { return function_ != nullptr; }

  void prepare(Compiler& compiler, Device& device) override;
  void run(StreamHandle stream) override {
    if (packed_grid_.blocks() > 0) function_->launch(packed_grid_, pointers_, stream);
  }
  std::vector<TiledKernel*> kernels() override { return {this}; }
  Cost cost() const override { return cost_; }
  Prediction predict(const DeviceSpec& device, DType dtype) const override { return predict(cost_, device, dtype); }

  // It runs on so many SMs of a partition; 0: on all of the device. Predictions follow.
  void confine(int processors) { processors_ = processors; }
  int processors() const { return processors_; }
  // What it waits for is on several streams: it does not overlap its predecessor (LaunchShape::overlaps_previous).
  void start_after_all() { after_all_ = true; }

 protected:
  // `space` is the namespace of the kernel.
  template <class Problem, class Tiling>
  TiledKernel(const KernelSpec<Problem, Tiling>& spec, const std::string& space,
              std::function<KernelLaunch(const Tiling&)> launch);

 private:
  // A partition has its share of the arithmetic and all of the bandwidth.
  Prediction predict(const Cost& cost, const DeviceSpec& device, DType dtype) const;

  std::string header_;
  Json tiling_;
  std::vector<Json> candidates_;
  Cost cost_;
  int processors_ = 0;
  bool after_all_ = false;
  // The typed functions of the spec, over JSON tilings.
  std::function<std::string(const Json&)> instance_;
  std::function<Json(const Json&)> normalize_;
  std::function<KernelLaunch(const Json&)> launch_;
  std::function<Cost(const Json&)> executed_;

  std::optional<CacheEntry> entry_;
  std::string loaded_;  // directory of the entry that function_ was loaded from
  LaunchShape loaded_shape_;
  std::unique_ptr<Function> function_;
  Buffer constants_;
  Arguments packed_;
  Grid packed_grid_;
  void** pointers_ = nullptr;
};

class CtKernel : public TiledKernel {
 public:
  template <class Problem, class Tiling>
  explicit CtKernel(CtKernelSpec<Problem, Tiling> spec)
      : TiledKernel(
            spec, "hypermla::", std::function([spec](const Tiling& tiling) {
              return KernelLaunch{spec.grid(tiling), {}, {}, [spec, tiling](void*) { return spec.arguments(tiling); }};
            })) {}
};

// CUDA C++ for Hopper (sm_90a): threads, shared memory, clusters and tensor maps are the plan's.
class CuteKernel : public TiledKernel {
 public:
  template <class Problem, class Tiling>
  explicit CuteKernel(CuteKernelSpec<Problem, Tiling> spec) : TiledKernel(spec, "hypermla::cute::", spec.launch) {}
};

class KernelPipeline : public Executable {
 public:
  KernelPipeline(std::string name, std::vector<std::unique_ptr<Executable>> stages);

  void prepare(Compiler& compiler, Device& device) override {
    for (auto& stage : stages_) stage->prepare(compiler, device);
  }
  void run(StreamHandle stream) override {
    for (auto& stage : stages_) stage->run(stream);
  }
  std::vector<TiledKernel*> kernels() override;
  std::vector<ConcurrentKernels*> groups() override;
  void validate_tilings() override {
    for (auto& stage : stages_) stage->validate_tilings();
  }
  Cost cost() const override;
  Prediction predict(const DeviceSpec& device, DType dtype) const override;  // the sum of the stages

 private:
  std::vector<std::unique_ptr<Executable>> stages_;
};

// Members that do not depend on each other and run at once: forked off the stream of run() by an event, each on its own
// stream, and joined to it again. On a CPU one after the other.
//
// On a device that they share, blocks of one member wait until those of another leave; the hardware chooses their
// order. The overlap is certain where members have SMs of their own, or blocks that all fit at once. The first kernel
// of a member, and one behind a group in a pipeline, starts after all that it waits for: overlapping its predecessor
// (LaunchShape::overlaps_previous) it would wait for its own stream only.
class ConcurrentKernels : public Executable {
 public:
  // Gets the kernels of all members, in order, with their present tilings; throws Error when they do not fit beside
  // each other.
  using JointValidation = std::function<void(const std::vector<TiledKernel*>&)>;

  // `partition`: SMs of each member's own (Device::streams()); empty: all share the device. What a member launches
  // should fit its SMs: the plan knows them when it builds it. A member of a partition may hold a group, all of whose
  // members run on the SMs of that member; throws Error when such a group is divided again.
  ConcurrentKernels(std::string name, std::vector<std::unique_ptr<Executable>> members,
                    JointValidation validate_joint_tiling = {}, std::vector<int> partition = {});

  void prepare(Compiler& compiler, Device& device) override;
  void run(StreamHandle stream) override {
    streams_->fork(stream);
    for (std::size_t i = 0; i < members_.size(); ++i) members_[i]->run(streams_->stream(i));
    streams_->join(stream);
  }
  std::vector<TiledKernel*> kernels() override;
  std::vector<ConcurrentKernels*> groups() override { return {this}; }
  void validate_tilings() override;
  Cost cost() const override;
  // The longest member alone, or the roofline of the work of all where that is longer: they share one memory and,
  // without a partition, one arithmetic.
  Prediction predict(const DeviceSpec& device, DType dtype) const override;

  const std::vector<int>& partition() const { return partition_; }

 private:
  // It is part of the i-th member of a divided group.
  void run_inside(const StreamGroup& streams, std::size_t i) { outer_ = &streams, outer_member_ = i; }

  std::vector<std::unique_ptr<Executable>> members_;
  JointValidation validate_joint_tiling_;
  std::vector<int> partition_;
  const StreamGroup* outer_ = nullptr;
  std::size_t outer_member_ = 0;
  std::unique_ptr<StreamGroup> streams_;
};

// A joint validation for persistent kernels, each a fixed number of blocks ("occupancy" in its tiling: that many on one
// SM, else one): throws Error when one has more blocks than its partition holds or, without partitions, all together
// have more than `processors` SMs hold. Those left over would run after the others, not beside them.
void require_resident_blocks(const std::vector<TiledKernel*>& kernels, int processors);

// Those that are launched with the present tilings: a merge of parts is not where nothing is cut.
std::vector<TiledKernel*> launched_kernels(Executable& executable);
// The groups of which two kernels or more are launched.
std::vector<ConcurrentKernels*> launched_groups(Executable& executable);

// hypermla::LatentProblem: a type as sources name it.
std::string type_name(const std::type_info& type);

template <class Problem, class Tiling>
TiledKernel::TiledKernel(const KernelSpec<Problem, Tiling>& spec, const std::string& space,
                         std::function<KernelLaunch(const Tiling&)> launch)
    : Executable(spec.name), header_(spec.header), tiling_(fields_json(spec.tiling)), cost_(spec.cost) {
  for (const Tiling& candidate : spec.candidates) candidates_.push_back(fields_json(candidate));
  instance_ = [spec, space](const Json& json) {
    const Tiling tiling = fields_from_json<Tiling>(json);
    const Tiling known = spec.at_compile_time ? spec.at_compile_time(tiling) : tiling;
    return space + spec.name + "<" + type_name(typeid(Problem)) + fields_initializer(spec.problem) + ", " +
           type_name(typeid(Tiling)) + fields_initializer(known) + ">";
  };
  const Tiling defaults = spec.tiling;
  normalize_ = [=](const Json& tiling) { return fields_json(fields_from_json<Tiling>(tiling, defaults)); };
  launch_ = [=](const Json& tiling) { return launch(fields_from_json<Tiling>(tiling)); };
  executed_ = [executed = spec.executed](const Json& tiling) { return executed(fields_from_json<Tiling>(tiling)); };
}

}  // namespace hypermla
