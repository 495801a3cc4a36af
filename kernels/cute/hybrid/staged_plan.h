// What the plans of the hybrid for Hopper share: both paths and their merge are kernels of their own, taken from the
// registry. A version says which kernel takes the decompressed path, on what each path runs, and in what order.
#pragma once

#include <algorithm>
#include <cmath>

#include "cute/hybrid/parts_time.h"
#include "hypermla/plan/stage.h"

namespace hypermla::cute {

// Where no times are known, as for the cases of `hypermla verify`, the least arithmetic decides, that on padded rows
// included: the device reads in no time.
inline DeviceSpec device_of_arithmetic() {
  DeviceSpec device;
  device.bfloat16_tflops = device.float16_tflops = 1;
  device.peak_gbps = 1e12;
  device.sm_count = 1;
  device.arch = "sm_90";
  return device;
}

template <class Tiling>
class StagedHybridPlan : public TimedHybridPlan<Tiling> {
 public:
  using AttentionPlan<HybridProblem, Tiling>::problem;
  using AttentionPlan<HybridProblem, Tiling>::tiling;
  using AttentionPlan<HybridProblem, Tiling>::target;

  void choose(const DeviceSpec& device) override {
    device_ = device.arch.empty() ? device_of_arithmetic() : device;
    TimedHybridPlan<Tiling>::choose(device);
  }

  std::vector<TensorSpec> tensors() const override {
    const HybridProblem& at = problem;
    std::vector<TensorSpec> all = tensors_of(at);
    auto workspace = [&](const char* name, DType dtype, std::vector<std::int64_t> shape) {
      all.push_back({name, Role::workspace, dtype, std::move(shape)});
    };
    if (combines() && latent_tokens(at)) {
      workspace("o_latent", at.dtype, {1, at.b, at.h, at.s, at.k});
      workspace("lse_latent", DType::float32, {1, at.b, at.h, at.s});
    }
    if (combines() && decompressed_tokens(at)) {
      workspace("o_new", at.dtype, {parts(), at.b, at.h, at.s, at.d});
      workspace("lse_new", DType::float32, {parts(), at.b, at.h, at.s});
    }
    for (const Stage& stage : stages())
      for (TensorSpec& spec : stage.workspaces()) all.push_back(std::move(spec));
    return all;
  }

 protected:
  // Decompressed, latent, combine: those that there are.
  virtual std::vector<Stage> stages() const = 0;
  // Of the decompressed tokens, each with an output of its own.
  virtual int parts() const { return 1; }

  // A version that there is not is refused for a path without tokens, too.
  void validate_stages() const {
    numbered("flash_mla", tiling.latent_version);
    stages();
  }

  // The version that would take the latent part alone, on the device that choose() was told of.
  int fastest_latent_version() const { return fastest("flash_mla", latent_fields(), {target, device_}); }
  // The version that is the fastest for the decompressed part on some of the processors, while all of memory is its.
  int fastest_decompressed_version(int processors) const {
    PlannedDevice on{{target.arch, processors}, device_};
    const double part = double(processors) / target.processors;
    on.spec.sm_count = std::max(1, int(std::lround(part * device_.sm_count)));
    for (double* rate : {&on.spec.bfloat16_tflops, &on.spec.float16_tflops}) *rate *= part;
    for (const char* rate : {"matmul_burst_tflops", "matmul_sustained_tflops"})
      if (const double whole = device_.measured_or(rate, 0); whole > 0) on.spec.measured[rate] = part * whole;
    return fastest("flash_attention", decompressed_fields(), on);
  }

  // One decompressed part in the order of the heads is the output itself.
  bool combines() const { return latent_tokens(problem) > 0 || parts() > 1 || problem.tokens_first; }

  Stage decompressed_stage(const std::vector<KernelEntry>& versions, const Target& on) const {
    return {versions,
            {on, device_},
            decompressed_fields(),
            "decompressed",
            {{"kpe", "kpe_new"},
             {"lengths", "new_lengths"},
             {"after_lengths", "lengths"},
             {"o", combines() ? "o_new" : "o"},
             {"lse", combines() ? "lse_new" : "lse"}}};
  }
  Stage latent_stage(const Target& on) const {
    return {numbered("flash_mla", tiling.latent_version),
            {on, device_},
            latent_fields(),
            "latent",
            {{"after_lengths", "new_lengths"}, {"o", "o_latent"}, {"lse", "lse_latent"}}};
  }
  Stage combine_stage() const {
    Json of = fields_json(problem);
    of.update({{"latent_parts", latent_tokens(problem) > 0 ? 1 : 0},
               {"decompressed_parts", decompressed_tokens(problem) > 0 ? parts() : 0}});
    return {numbered("decompress_combine", 0), {target, device_}, of, "combine"};
  }
  static std::vector<KernelEntry> numbered(const std::string& design, int version) {
    return {Registry::instance().find(design, fmt::format("v{}", version), "sm_90", "cute")};
  }

 private:
  Json decompressed_fields() const {
    Json of = fields_json(problem);
    of.update({{"t", decompressed_tokens(problem)},
               {"parts", parts()},
               {"after", problem.causal && problem.prefixes ? latent_tokens(problem) : 0}});
    return of;
  }
  // A request's own decompressed tokens are behind its latent ones; of a prefix they are before them.
  Json latent_fields() const {
    Json of = fields_json(problem);
    of.update({{"t", latent_tokens(problem)},
               {"after", problem.prefixes > 0 ? 0 : decompressed_tokens(problem)},
               {"tokens_first", false}});
    return of;
  }
  // The number of the version that configure() takes for a part; the base version where none takes the part, since
  // stages() says why.
  static int fastest(const std::string& design, const Json& part, const PlannedDevice& on) {
    try {
      return std::stoi(configure(versions_of(design), on, {.offered = part}).entry.version.substr(1));
    } catch (const Error&) {
      return 0;
    }
  }

  DeviceSpec device_ = device_of_arithmetic();
};

}  // namespace hypermla::cute
