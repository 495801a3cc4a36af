#include "mla_var6_plus_v5.h"

#include <algorithm>

#include "cute/hybrid/staged_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

// What one multiprocessor of an H200 computes in the latent path and reads in the decompressed one, each beside the
// other path, and what memory gives all that read; a second. docs/kernels/cute-mla-var6-plus-v5.md
constexpr double kLatentFlops = 5.2e12, kReadBytes = 64e9, kMemoryBytes = 3.9e12;

// Seconds of both paths at once, with `readers` of the `processors` on the decompressed path.
double seconds_of_paths(const HybridProblem& at, int readers, int processors) {
  const double rows = double(at.b) * at.h * at.s, width = dtype_bytes(at.dtype);
  const double flops = 2 * rows * latent_tokens(at) * (2 * at.k + at.p);
  const double bytes = width * at.b * decompressed_tokens(at) * (2.0 * at.h * at.d + at.p);
  return std::max(flops / (kLatentFlops * (processors - readers)),
                  bytes / std::min(kReadBytes * readers, kMemoryBytes));
}

class MlaVar6PlusV5Plan : public StagedHybridPlan<MlaVar6PlusV5Tiling> {
 public:
  void validate() const override {
    validate_hybrid(problem);
    if (problem.prefixes > 0)
      fail("--prefixes={} is not supported by this version: v0 takes shared prefixes", problem.prefixes);
    const int smaller = std::min(tiling.processors, target.processors - tiling.processors);
    if (smaller % 8 || smaller < 8)
      fail("--processors={} is not supported: it, or what it leaves of the {} there are, must be a multiple of 8",
           tiling.processors, target.processors);
    numbered("flash_attention", tiling.decompressed_version);
    validate_stages();
  }

  // As many multiprocessors for the decompressed path as make both equally long.
  void use_default_tiling() override {
    if (!has_extents(problem)) return;  // validate() says what is wrong
    auto time = [&](int processors) { return seconds_of_paths(problem, processors, target.processors); };
    tiling.processors = 8;
    for (int smaller = 8; smaller <= target.processors / 2; smaller += 8)
      for (int processors : {smaller, target.processors - smaller})
        if (time(processors) < time(tiling.processors)) tiling.processors = processors;
    tiling.latent_version = fastest_latent_version();
    tiling.decompressed_version = fastest_decompressed_version(decompressed().processors);
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    std::vector<std::unique_ptr<Executable>> all;
    for (const Stage& stage : stages()) all.push_back(stage.plan(tensors));
    if (has_both_parts(problem)) {
      std::vector<std::unique_ptr<Executable>> paths;
      paths.push_back(std::move(all[0]));
      paths.push_back(std::move(all[1]));
      all.erase(all.begin());
      all[0] = std::make_unique<ConcurrentKernels>("paths", std::move(paths), ConcurrentKernels::JointValidation{},
                                                   std::vector<int>{decompressed().processors, latent().processors});
    }
    return std::make_unique<KernelPipeline>("mla_var6_plus_v5", std::move(all));
  }

 private:
  // What each path runs on: a part of the device beside the other path, else all of it.
  Target decompressed() const { return {target.arch, has_both_parts(problem) ? tiling.processors : target.processors}; }
  Target latent() const { return {target.arch, target.processors - (has_both_parts(problem) ? tiling.processors : 0)}; }

  std::vector<Stage> stages() const override {
    std::vector<Stage> all;
    if (decompressed_tokens(problem) > 0)
      all.push_back(decompressed_stage(numbered("flash_attention", tiling.decompressed_version), decompressed()));
    if (latent_tokens(problem) > 0) all.push_back(latent_stage(latent()));
    if (combines()) all.push_back(combine_stage());
    return all;
  }

  // The decompressed path beside the latent one, fitted to the envelope of 2026-11-21 (an older
  // results/nvidia-h200/envelope.json): 1495 and 2311 us (sustained 1645, 2443) at s = 32 and 64.
  std::vector<Figures> figures() const override {
    return {{.rows = 16, .burst = 0.3, .sustained = 0.3, .memory = 0.92, .readers = 0.3},
            {.rows = 32, .burst = 0.65, .sustained = 0.62, .memory = 0.92, .readers = 0.3},
            {.rows = 64, .burst = 0.70, .sustained = 0.70, .memory = 0.92, .readers = 0.3}};
  }
  const HybridParts& parts_of_time() const override {
    static const HybridParts parts = of_cute({.overlap = 0.92, .beside = figures()});
    return parts;
  }
};

HYPERMLA_REGISTER(MlaVar6PlusV5Plan, "the hybrid on Hopper: both paths at once, each on multiprocessors of its own")

}  // namespace
}  // namespace hypermla::cute
