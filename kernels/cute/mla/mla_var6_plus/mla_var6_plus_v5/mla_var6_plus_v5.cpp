#include "mla_var6_plus_v5.h"

#include <algorithm>

#include "hypermla/plan/hybrid.h"
#include "hypermla/plan/registry.h"
#include "hypermla/plan/stage.h"

namespace hypermla::cute {
namespace {

// What one multiprocessor of an H200 computes in the latent path, and streams in the other, each beside the other
// path; and what memory gives all that stream (docs/kernels/cute-mla-var6-plus-v5.md).
constexpr double kLatentRate = 5.2e12, kStreamRate = 64e9, kMemoryRate = 3.9e12;

class MlaVar6PlusV5Plan : public TypedPlan<MlaVar6PlusV5Problem, MlaVar6PlusV5Tiling> {
 public:
  void choose(const DeviceSpec& device) override { choose_new_tokens(problem, "cute.mla.mla_var6_plus_v5", device); }
  void validate() const override {
    validate_hybrid(problem);
    if (problem.prefixes > 0)
      fail("--prefixes={} is not supported by this version: v0 takes shared prefixes", problem.prefixes);
    if (tiling.latent_rows != 64 && tiling.latent_rows != 32)
      fail("--latent_rows={} is not supported: choose 64 or 32", tiling.latent_rows);
    const int smaller = std::min(tiling.processors, target.processors - tiling.processors);
    if (smaller % 8 || smaller < 8)
      fail("--processors={} is not supported: it, or what it leaves of the {} there are, must be a multiple of 8",
           tiling.processors, target.processors);
    const int n = new_tokens(problem);
    // The mask would end in the latent part, and each request has a length of its own only on the device.
    if (problem.causal && n > 0 && n < problem.t && (problem.ragged || n < problem.s))
      fail("--causal with --n={} is not supported here: give n=0, n={} or, without --ragged, from s={} on; "
           "the cutile kernels take all (--language=cutile)",
           n, problem.t, problem.s);
    stages();
  }

  // As many multiprocessors for the decompressed path as make both equally long.
  void use_default_tiling() override {
    const double rows = double(problem.b) * problem.h * problem.s, width = dtype_bytes(problem.dtype);
    const double flops = 2 * rows * latent_tokens(problem) * (2 * problem.k + problem.p);
    const double bytes = width * problem.b * new_tokens(problem) * (2.0 * problem.h * problem.d + problem.p);
    auto time = [&](int processors) {
      return std::max(flops / (kLatentRate * (target.processors - processors)),
                      bytes / std::min(kStreamRate * processors, kMemoryRate));
    };
    tiling.processors = 8;
    for (int smaller = 8; smaller <= target.processors / 2; smaller += 8)
      for (int processors : {smaller, target.processors - smaller})
        if (time(processors) < time(tiling.processors)) tiling.processors = processors;
    // Rows on the columns of wgmma where a request has few rows, or there is little to do:
    // docs/kernels/cute-flash-mla-v1.md.
    const std::int64_t of_request = std::int64_t{problem.h} * problem.s;
    const std::int64_t blocks = problem.b * ((latent_tokens(problem) + 63) / 64) * ((of_request + 31) / 32);
    tiling.latent_rows = of_request <= 64 || (of_request <= 128 && blocks <= 16 * target.processors) ? 32 : 64;
  }

  std::vector<TensorSpec> tensors() const override {
    const MlaVar6PlusV5Problem& at = problem;
    std::vector<TensorSpec> all = hybrid_tensors(at);
    auto workspace = [&](const char* name, DType dtype, std::vector<std::int64_t> shape) {
      all.push_back({name, Role::workspace, dtype, std::move(shape)});
    };
    if (combines()) {
      if (latent_tokens(at)) {
        workspace("o_latent", at.dtype, {1, at.b, at.h, at.s, at.k});
        workspace("lse_latent", DType::float32, {1, at.b, at.h, at.s});
      }
      if (new_tokens(at)) {
        workspace("o_new", at.dtype, {1, at.b, at.h, at.s, at.d});
        workspace("lse_new", DType::float32, {1, at.b, at.h, at.s});
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
    if (both()) {
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
  bool both() const { return new_tokens(problem) > 0 && latent_tokens(problem) > 0; }
  // The decompressed part in the order of the heads is the output itself.
  bool combines() const { return latent_tokens(problem) > 0 || problem.tokens_first; }

  // What each path runs on: a part of the device beside the other path, else all of it.
  Target decompressed() const { return {target.arch, both() ? tiling.processors : target.processors}; }
  Target latent() const { return {target.arch, target.processors - (both() ? tiling.processors : 0)}; }

  // Decompressed, latent, combine: those that there are.
  std::vector<Stage> stages() const {
    using Names = std::map<std::string, std::string>;
    const MlaVar6PlusV5Problem& at = problem;
    const int o = latent_tokens(at), n = new_tokens(at);
    const Json shape = fields_json(at);
    std::vector<Stage> all;
    if (n > 0) {
      Json of = shape;
      of["t"] = n;
      // v1 reads keys and values once for every 64 queries.
      all.emplace_back("cute.mla.flash_attention", at.s <= 64 ? "v1" : "v0", decompressed(), of, "decompressed",
                       Names{{"kpe", "kpe_new"},
                             {"lengths", "new_lengths"},
                             {"o", combines() ? "o_new" : "o"},
                             {"lse", combines() ? "lse_new" : "lse"}});
    }
    if (o > 0) {
      Json of = shape;
      of.update({{"t", o}, {"causal", at.causal && n == 0}});
      all.emplace_back("cute.mla.flash_mla", tiling.latent_rows == 32 ? "v1" : "v0", latent(), of, "latent",
                       Names{{"o", "o_latent"}, {"lse", "lse_latent"}});
    }
    if (combines()) {
      Json of = shape;
      of.update({{"latent_parts", o > 0 ? 1 : 0}, {"decompressed_parts", n > 0 ? 1 : 0}});
      all.emplace_back("cute.mla.decompress_combine", "", target, of, "combine");
    }
    return all;
  }
};

HYPERMLA_REGISTER(MlaVar6PlusV5Plan,
                        "the hybrid on Hopper: both paths at once, each on multiprocessors of its own")

}  // namespace
}  // namespace hypermla::cute
