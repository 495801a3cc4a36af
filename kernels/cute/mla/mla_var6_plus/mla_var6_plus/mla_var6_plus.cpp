#include "mla_var6_plus.h"

#include <algorithm>
#include <cmath>

#include "hypermla/plan/hybrid.h"
#include "hypermla/plan/registry.h"
#include "hypermla/plan/stage.h"

namespace hypermla::cute {
namespace {

class MlaVar6PlusPlan : public TypedPlan<MlaVar6PlusProblem, MlaVar6PlusTiling> {
 public:
  void choose(const DeviceSpec& device) override { choose_new_tokens(problem, "cute.mla.mla_var6_plus", device); }
  void validate() const override {
    validate_hybrid(problem);
    if (tiling.latent_rows != 64 && tiling.latent_rows != 32)
      fail("--latent_rows={} is not supported: choose 64 or 32", tiling.latent_rows);
    require_positive("parts", tiling.parts);
    if (tiling.parts > 1 && problem.prefixes == 0) fail("--parts={} needs a prefix: add --prefixes=1", tiling.parts);
    const int n = new_tokens(problem);
    // The mask would end in the latent part, and each request has a length of its own only on the device.
    if (problem.causal && problem.prefixes == 0 && n > 0 && n < problem.t && (problem.ragged || n < problem.s))
      fail("--causal with --n={} is not supported here: give n=0, n={} or, without --ragged, from s={} on; the cutile kernels "
           "take all (--language=cutile)", n, problem.t, problem.s);
    stages();
  }

  void use_default_tiling() override {
    const MlaVar6PlusProblem& at = problem;
    // Rows on the columns of wgmma where a request has few rows, or there is little to do: docs/kernels/cute-flash-mla-v1.md.
    const std::int64_t rows = std::int64_t{at.h} * at.s, latent = latent_tokens(at);
    const std::int64_t blocks = at.b * ((latent + 63) / 64) * ((rows + 31) / 32);
    tiling.latent_rows = rows <= 64 || (rows <= 128 && blocks <= 16 * target.processors) ? 32 : 64;
    tiling.parts = 1;
    if (at.prefixes == 0 || new_tokens(at) == 0) return;
    // As many parts as make the last wave of tiles full, if they are worth their merge.
    const std::int64_t tiles = tiles_of_prefixes();
    auto waves = [&](int parts) {
      const std::int64_t all = tiles * parts;
      return double((all + target.processors - 1) / target.processors) / parts + 0.03 * (parts - 1);
    };
    for (int parts = 2; parts <= 16 && new_tokens(at) / parts >= 512; ++parts)
      if (waves(parts) < waves(tiling.parts)) tiling.parts = parts;
  }

  std::vector<TensorSpec> tensors() const override {
    std::vector<TensorSpec> all = hybrid_tensors(problem);
    const auto& at = problem;
    auto workspace = [&](const char* name, DType dtype, std::vector<std::int64_t> shape) {
      all.push_back({name, Role::workspace, dtype, std::move(shape)});
    };
    if (combines()) {
      if (latent_tokens(at)) {
        workspace("o_latent", at.dtype, {1, at.b, at.h, at.s, at.k});
        workspace("lse_latent", DType::float32, {1, at.b, at.h, at.s});
      }
      if (new_tokens(at)) {
        workspace("o_new", at.dtype, {tiling.parts, at.b, at.h, at.s, at.d});
        workspace("lse_new", DType::float32, {tiling.parts, at.b, at.h, at.s});
      }
    }
    for (const Stage& stage : stages())
      for (TensorSpec& spec : stage.workspaces()) all.push_back(std::move(spec));
    return all;
  }
  InputRules input_rules(std::uint64_t) const override { return hybrid_input_rules(problem); }
  ReferenceShape reference_shape() const override { return hybrid_reference_shape(problem); }
  ReferenceOutputs reference(std::int64_t group, const InputReader& input) const override {
    return hybrid_reference(problem, group, input);
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    std::vector<std::unique_ptr<Executable>> all;
    for (const Stage& stage : stages()) all.push_back(stage.plan(tensors));
    return std::make_unique<KernelPipeline>("mla_var6_plus", std::move(all));
  }

 private:
  // One decompressed part in the order of the heads is the output itself.
  bool combines() const { return latent_tokens(problem) > 0 || tiling.parts > 1 || problem.tokens_first; }

  std::int64_t tiles_of_prefixes() const {
    const std::int64_t per_tile = std::max(1, 128 / problem.s), per_request = (problem.s + 127) / 128;
    return ((problem.b + per_tile - 1) / per_tile + problem.prefixes - 1) * per_request * problem.h;
  }

  std::vector<Stage> stages() const {
    const MlaVar6PlusProblem& at = problem;
    const int o = latent_tokens(at), n = new_tokens(at);
    Json shape = fields_json(at);
    std::vector<Stage> all;
    if (n > 0) {
      Json decompressed = shape;
      decompressed.update({{"t", n}, {"parts", tiling.parts}, {"after", at.causal && at.prefixes ? o : 0}});
      all.emplace_back("flash_attention", "", target, decompressed, "decompressed",
                       std::map<std::string, std::string>{{"kpe", "kpe_new"},
                                                          {"lengths", "new_lengths"},
                                                          {"after_lengths", "lengths"},
                                                          {"o", combines() ? "o_new" : "o"},
                                                          {"lse", combines() ? "lse_new" : "lse"}});
    }
    if (o > 0) {
      Json latent = shape;
      latent.update({{"t", o}, {"causal", at.causal && (at.prefixes > 0 || n == 0)}});
      all.emplace_back("cute.mla.flash_mla", tiling.latent_rows == 32 ? "v1" : "v0", target, latent, "latent",
                       std::map<std::string, std::string>{{"o", "o_latent"}, {"lse", "lse_latent"}});
    }
    if (combines()) {
      Json merged = shape;
      merged.update({{"latent_parts", o > 0 ? 1 : 0}, {"decompressed_parts", n > 0 ? tiling.parts : 0}});
      all.emplace_back("cute.mla.decompress_combine", "", target, merged, "combine");
    }
    return all;
  }
};

HYPERMLA_REGISTER(MlaVar6PlusPlan, "the hybrid on Hopper: latent tokens and decompressed ones, shared prefixes among them")

}  // namespace
}  // namespace hypermla::cute
