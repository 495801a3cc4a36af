// What the plans of the hybrid for Hopper share: both paths and their merge are kernels of their own, taken from the
// registry. A version says which kernel takes the decompressed path, on what each path runs, and in what order.
#pragma once

#include <cmath>

#include "cute/hybrid/parts_time.h"
#include "hypermla/plan/configure.h"
#include "hypermla/plan/stage.h"

namespace hypermla::cute {

template <class Tiling>
class StagedHybridPlan : public TimedHybridPlan<Tiling> {
 public:
  using AttentionPlan<HybridProblem, Tiling>::problem;
  using AttentionPlan<HybridProblem, Tiling>::tiling;
  using AttentionPlan<HybridProblem, Tiling>::target;

  void choose(const DeviceSpec& device) override {
    device_ = device;
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
    if (combines() && new_tokens(at)) {
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

  void validate_paths() const {
    if (tiling.latent_rows != 64 && tiling.latent_rows != 32)
      fail("--latent_rows={} is not supported: choose 64 or 32", tiling.latent_rows);
    stages();
  }

  // Those of the version of flash_mla that is faster on the device that choose() was told of. Where no times are known,
  // as for the cases of `hypermla verify`, v1 takes few rows of a request, and work that is soon done
  // (docs/kernels/cute-flash-mla-v1.md).
  int default_latent_rows() const {
    const double base = latent_seconds("v0"), few = latent_seconds("v1");
    if (std::isfinite(base) && std::isfinite(few)) return few < base ? 32 : 64;
    const std::int64_t rows = std::int64_t{problem.h} * problem.s;
    const std::int64_t blocks = problem.b * ((latent_tokens(problem) + 63) / 64) * ((rows + 31) / 32);
    return rows <= 32 || (rows <= 128 && blocks <= 2 * target.processors) ? 32 : 64;
  }

  // One decompressed part in the order of the heads is the output itself.
  bool combines() const { return latent_tokens(problem) > 0 || parts() > 1 || problem.tokens_first; }

  Stage decompressed_stage(const std::string& kernel, const std::string& version, const Target& on) const {
    Json of = fields_json(problem);
    of.update({{"t", new_tokens(problem)},
               {"parts", parts()},
               {"after", problem.causal && problem.prefixes ? latent_tokens(problem) : 0}});
    return {kernel,
            version,
            on,
            of,
            "decompressed",
            {{"kpe", "kpe_new"},
             {"lengths", "new_lengths"},
             {"after_lengths", "lengths"},
             {"o", combines() ? "o_new" : "o"},
             {"lse", combines() ? "lse_new" : "lse"}}};
  }
  Stage latent_stage(const Target& on) const {
    return {"cute.mla.flash_mla",
            tiling.latent_rows == 32 ? "v1" : "v0",
            on,
            latent_fields(),
            "latent",
            {{"after_lengths", "new_lengths"}, {"o", "o_latent"}, {"lse", "lse_latent"}}};
  }
  Stage combine_stage() const {
    Json of = fields_json(problem);
    of.update({{"latent_parts", latent_tokens(problem) > 0 ? 1 : 0},
               {"decompressed_parts", new_tokens(problem) > 0 ? parts() : 0}});
    return {"cute.mla.decompress_combine", "", target, of, "combine"};
  }

 private:
  // A request's own decompressed tokens are behind its latent ones; of a prefix they are before them.
  Json latent_fields() const {
    Json of = fields_json(problem);
    of.update({{"t", latent_tokens(problem)},
               {"after", problem.prefixes > 0 ? 0 : new_tokens(problem)},
               {"tokens_first", false}});
    return of;
  }
  // Of the latent path alone; infinite where it is not known.
  double latent_seconds(const char* version) const {
    const std::unique_ptr<KernelPlan> plan = Registry::instance().find("cute.mla.flash_mla", version).make();
    from_json(plan->problem_fields(), known_fields(*plan, latent_fields()));
    return expected_seconds(*plan, device_);
  }

  DeviceSpec device_;
};

}  // namespace hypermla::cute
