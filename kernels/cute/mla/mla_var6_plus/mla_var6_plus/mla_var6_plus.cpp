#include "mla_var6_plus.h"

#include <algorithm>

#include "cute/hybrid/staged_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

class MlaVar6PlusPlan : public StagedHybridPlan<MlaVar6PlusTiling> {
 public:
  void validate() const override {
    validate_hybrid(problem);
    require_positive("parts", tiling.parts);
    if (tiling.parts > 1 && problem.prefixes == 0) fail("--parts={} needs a prefix: add --prefixes=1", tiling.parts);
    validate_stages();
  }

  void use_default_tiling() override {
    if (!has_extents(problem)) return;  // validate() says what is wrong
    tiling.latent_version = fastest_latent_version();
    tiling.parts = 1;
    if (problem.prefixes == 0 || decompressed_tokens(problem) == 0) return;
    // As many parts as make the last wave of tiles full, if they are worth their merge.
    const std::int64_t tiles = tiles_of_prefixes();
    auto waves = [&](int parts) {
      const std::int64_t all = tiles * parts;
      return double((all + target.processors - 1) / target.processors) / parts + 0.03 * (parts - 1);
    };
    for (int parts = 2; parts <= 16 && decompressed_tokens(problem) / parts >= 512; ++parts)
      if (waves(parts) < waves(tiling.parts)) tiling.parts = parts;
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    std::vector<std::unique_ptr<Executable>> all;
    for (const Stage& stage : stages()) all.push_back(stage.plan(tensors));
    return std::make_unique<KernelPipeline>("mla_var6_plus", std::move(all));
  }

 private:
  int parts() const override { return tiling.parts; }

  std::int64_t tiles_of_prefixes() const {
    const std::int64_t per_tile = std::max(1, 128 / problem.s), per_request = (problem.s + 127) / 128;
    return ((problem.b + per_tile - 1) / per_tile + problem.prefixes - 1) * per_request * problem.h;
  }

  std::vector<Stage> stages() const override {
    std::vector<Stage> all;
    if (decompressed_tokens(problem) > 0)
      all.push_back(decompressed_stage(versions_of("flash_attention", "prefixes"), target));
    if (latent_tokens(problem) > 0) all.push_back(latent_stage(target));
    if (combines()) all.push_back(combine_stage());
    return all;
  }

  const HybridParts& parts_of_time() const override {
    static const HybridParts parts = of_cute(
        {.together = Together::in_turn, .decompressed = figures_of(versions_of("flash_attention", "prefixes"))});
    return parts;
  }
};

HYPERMLA_REGISTER(MlaVar6PlusPlan,
                  "the hybrid on Hopper: latent tokens and decompressed ones, shared prefixes among them")

}  // namespace
}  // namespace hypermla::cute
