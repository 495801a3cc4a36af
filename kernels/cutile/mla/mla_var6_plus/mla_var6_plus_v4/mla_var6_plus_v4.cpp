#include "mla_var6_plus_v4.h"

#include "cutile/hybrid/hybrid_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

using LatentTiling = MlaVar6PlusV4LatentTiling;
using DecompressedTiling = MlaVar6PlusV4DecompressedTiling;

// What green contexts split a GPU by, from Hopper on.
constexpr int kGranularity = 8;

// Multiprocessors of the two paths.
struct Shares {
  int latent, decompressed;
};
template <class Tiling>
int processors_of(const Tiling& tiling) {
  return int(ceil_div(tiling.blocks, tiling.occupancy));
}

class MlaVar6PlusV4Plan : public HybridPlan<MlaVar6PlusV4Tiling> {
 public:
  void validate() const override {
    validate_hybrid(problem);
    require_power_of_two("latent_Bm", tiling.latent.Bm, 16, 128);
    require_power_of_two("latent_Bn", tiling.latent.Bn, 16, 256);
    require_power_of_two("latent_Bv", tiling.latent.Bv, 16, problem.k);
    require_power_of_two("latent_Bk", tiling.latent.Bk, 16, problem.k);
    require_power_of_two("decompressed_Bb", tiling.decompressed.Bb, 1, 128);
    require_power_of_two("decompressed_Bs", tiling.decompressed.Bs, 1, 128);
    require_power_of_two("decompressed_Bn", tiling.decompressed.Bn, 16, 256);
    if (tiling.decompressed.Bb * tiling.decompressed.Bs < 16)
      fail("--decompressed_Bb={} --decompressed_Bs={} is not supported: a unit needs at least 16 rows",
           tiling.decompressed.Bb, tiling.decompressed.Bs);
    require_parts("latent_parts", tiling.latent.parts);
    require_parts("decompressed_parts", tiling.decompressed.parts);
    for (const auto& [name, warps] : {std::pair("latent_num_warps", tiling.latent.num_warps),
                                      {"decompressed_num_warps", tiling.decompressed.num_warps}})
      require_power_of_two(name, warps, 1, 32);
    for (const auto& [name, value] : {std::pair("latent_occupancy", tiling.latent.occupancy),
                                      {"decompressed_occupancy", tiling.decompressed.occupancy},
                                      {"latent_blocks", tiling.latent.blocks},
                                      {"decompressed_blocks", tiling.decompressed.blocks}})
      require_positive(name, value);
    if (both_paths()) plan_empty(*this)->validate_tilings();
  }

  void use_default_tiling() override {
    if (!has_extents(problem)) return;  // validate() says what is wrong
    tiling = {};
    tiling.partition = target.is_gpu() && target.processors >= 4 * kGranularity;
    const Shares shares = default_shares();
    tiling.latent = latent_candidates(shares.latent).front();
    tiling.decompressed = decompressed_candidates(shares.decompressed).front();
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    std::unique_ptr<CtKernel> latent = latent_kernel(tensors), decompressed = decompressed_kernel(tensors);
    const CombineProblem last = combine_problem(cutting()(tiling));
    const std::vector<DecompressCombineTiling> tilings = combine_candidates(last, target);
    auto parts = [at = problem, a = latent.get(), b = decompressed.get()] {
      const int latent_parts = a->tiling().at("parts"), decompressed_parts = b->tiling().at("parts");
      return CombineParts{latent_tokens(at) ? latent_parts : 0, decompressed_tokens(at) ? decompressed_parts : 0};
    };
    std::unique_ptr<CtKernel> combined = combine_kernel(last, tilings.front(), tilings, tensors, parts);
    std::vector<std::unique_ptr<Executable>> paths;
    paths.push_back(std::move(latent));
    paths.push_back(std::move(decompressed));
    // Without tokens a path launches nothing, and the other one needs no stream of its own.
    std::vector<std::unique_ptr<Executable>> stages;
    if (both_paths())
      stages.push_back(at_once(std::move(paths)));
    else
      stages = std::move(paths);
    stages.push_back(std::move(combined));
    return std::make_unique<KernelPipeline>("mla_var6_plus_v4", std::move(stages));
  }

 private:
  bool both_paths() const { return latent_tokens(problem) && decompressed_tokens(problem); }

  std::unique_ptr<ConcurrentKernels> at_once(std::vector<std::unique_ptr<Executable>> paths) const {
    ConcurrentKernels::JointValidation validate;
    std::vector<int> partition;
    if (target.is_gpu()) {
      validate = [processors = target.processors](const std::vector<TiledKernel*>& kernels) {
        require_resident_blocks(kernels, processors);
      };
      const int whole = int(ceil_div(processors_of(tiling.decompressed), kGranularity)) * kGranularity;
      if (tiling.partition) partition = {std::max(1, target.processors - whole), whole};
    }
    return std::make_unique<ConcurrentKernels>("mla_var6_plus_v4_paths", std::move(paths), validate, partition);
  }

  // Seconds of a path whole, on so many SMs, by what one SM of an H200 did: a latent block 3.7 TFLOP/s
  // (docs/kernels/flash-mla.md); decompressed blocks 48 GB/s of K and V, 35 where all SMs read, or 3.3 TFLOP/s where
  // the queries are many.
  double seconds(const LatentCut& cut, int processors) const {
    return executed_by(problem, cut).flops / 3.7e12 / processors;
  }
  double seconds(const DecompressedCut& cut, int processors) const {
    const Cost cost = executed_by(problem, cut);
    return std::max(cost.bytes / std::min(48e9 * processors, bandwidth()), cost.flops / 3.3e12 / processors);
  }
  double bandwidth() const { return 35e9 * target.processors; }

  // The division after which the longer path ends first. On a CPU, where one path runs after the other, both have all
  // of it.
  Shares default_shares() const {
    const int all = target.processors;
    if (!target.is_gpu() || !both_paths()) return {all, all};
    const LatentCut latent = cut_of(latent_tiles().front());
    const DecompressedCut decompressed = cut_of(decompressed_tiles().front());
    auto longer = [&](int processors) {
      return std::max(seconds(latent, all - processors), seconds(decompressed, processors));
    };
    const int step = tiling.partition ? kGranularity : 1;
    int best = step;
    for (int processors = step; processors < all; processors += step)
      if (longer(processors) < longer(best)) best = processors;
    return {all - best, best};
  }

  LatentCut cut_of(const LatentTiling& at) const {
    return {
        at.Bm, at.Bn, at.Bv, problem.h, latent_tokens(problem) ? at.parts : 0, latent_tokens(problem) ? at.blocks : 0};
  }
  DecompressedCut cut_of(const DecompressedTiling& at) const {
    return {at.Bb, at.Bs, at.Bn, decompressed_tokens(problem) ? at.parts : 0,
            decompressed_tokens(problem) ? at.blocks : 0};
  }
  std::function<HybridCut(const MlaVar6PlusV4Tiling&)> cutting() const override {
    return [self = *this](const MlaVar6PlusV4Tiling& tiling) {
      return HybridCut{self.cut_of(tiling.latent), self.cut_of(tiling.decompressed)};
    };
  }

  // The kernels' candidates as tilings of the whole, for the size of the workspace: the budgets are those of the
  // present tiling.
  std::vector<MlaVar6PlusV4Tiling> candidates() const override {
    std::vector<MlaVar6PlusV4Tiling> all;
    for (const LatentTiling& latent : latent_candidates(processors_of(tiling.latent)))
      all.push_back({latent, tiling.decompressed, tiling.partition});
    for (const DecompressedTiling& decompressed : decompressed_candidates(processors_of(tiling.decompressed)))
      all.push_back({tiling.latent, decompressed, tiling.partition});
    return all;
  }

  // {Bm, Bn, Bv, Bk, parts, blocks, num_warps, occupancy}: as flash_mla's.
  std::vector<LatentTiling> latent_tiles() const {
    std::vector<LatentTiling> tilings;
    if (!target.is_gpu())
      tilings = {{64, 64, 512, 512, 1, 1, 1, 1}};
    else if (target.has_large_blocks())
      tilings = {{64, 64, 512, 128, 1, 1, 8, 1}, {64, 64, 512, 256, 1, 1, 8, 1}};
    else if (target.is_small_blackwell())
      tilings = {{64, 32, 512, 128, 1, 1, 8, 1}};
    else
      tilings = {{32, 32, 128, 64, 1, 1, 8, 1}};
    for (LatentTiling& tiling : tilings) {
      tiling.Bv = std::min(tiling.Bv, problem.k);
      tiling.Bk = std::min(tiling.Bk, problem.k);
    }
    return tilings;
  }
  // {Bb, Bs, Bn, parts, blocks, num_warps, occupancy}: as flash_attention's. With 32 x 32 a stack frame is kept, with
  // 64 x 128 there are 255 registers.
  std::vector<DecompressedTiling> decompressed_tiles() const {
    const int rows = problem.s <= 16 ? 16 : 64;
    if (!target.is_gpu()) return {{1, rows, 64, 1, 1, 1, 1}};
    if (!target.has_large_blocks()) return {{1, rows, 64, 1, 1, 4, rows == 16 ? 2 : 1}};
    if (rows == 16) return {{1, rows, 128, 1, 1, 4, 2}, {1, rows, 64, 1, 1, 4, 2}};
    return {{1, rows, 64, 1, 1, 4, 2}};
  }

  // As many cuts along the tokens as let the blocks end together, unless writing and reading the partial outputs takes
  // longer.
  template <class Cut>
  int best_parts(const Cut& cut, int processors, int tokens, int width) const {
    const double one = seconds(cut, processors), units = units_of(problem, cut);
    const double partial = double(problem.b) * problem.h * problem.s * (dtype_bytes(problem.dtype) * width + 4);
    auto end = [&](int parts) {
      return one * std::ceil(units * parts / cut.blocks) * cut.blocks / (units * parts) +
             parts * 2 * partial / bandwidth();
    };
    int best = 1;
    for (int parts = 2; parts <= std::min(int(ceil_div(tokens, cut.Bn)), 16); ++parts)
      if (end(parts) < end(best)) best = parts;
    return best;
  }
  // With the budget of so many SMs, in parts and whole.
  template <class Tiling>
  std::vector<Tiling> with_budget(const std::vector<Tiling>& tiles, int processors, int tokens, int width) const {
    std::vector<Tiling> tilings;
    for (Tiling tiling : tiles) {
      tiling.blocks = processors * tiling.occupancy;
      const int parts = tokens ? best_parts(cut_of(tiling), processors, tokens, width) : 1;
      if (parts > 1) {
        tiling.parts = parts;
        tilings.push_back(tiling);
      }
      tiling.parts = 1;
      tilings.push_back(tiling);
    }
    return tilings;
  }
  std::vector<LatentTiling> latent_candidates(int processors) const {
    return with_budget(latent_tiles(), processors, latent_tokens(problem), problem.k);
  }
  std::vector<DecompressedTiling> decompressed_candidates(int processors) const {
    return with_budget(decompressed_tiles(), processors, decompressed_tokens(problem), problem.d);
  }

  // Fewer units than the budget leave no block without work.
  template <class Cut>
  static Grid grid_of(const HybridProblem& at, const Cut& cut) {
    return {unsigned(std::min<double>(cut.blocks, units_of(at, cut))), 1, 1};
  }
  // Until the last block ends: blocks take equally many units, or one more.
  template <class Cut>
  static Cost executed(const HybridProblem& at, const Cut& cut) {
    const Cost cost = executed_by(at, cut);
    const double units = units_of(at, cut), blocks = grid_of(at, cut).x,
                 late = std::ceil(units / blocks) * blocks / units;
    return {cost.flops * late, cost.bytes * late};
  }

  template <class Tiling>
  CtKernelSpec<HybridProblem, Tiling> spec_of(const char* name, const char* file, const Tiling& present,
                                              std::vector<Tiling> candidates) const {
    CtKernelSpec<HybridProblem, Tiling> spec;
    spec.name = name;
    spec.header = beside(__FILE__, file);
    spec.problem = at_compile_time();
    spec.tiling = present;
    spec.candidates = std::move(candidates);
    spec.at_compile_time = [](Tiling tiling) {
      tiling.parts = tiling.blocks = 0;
      return tiling;
    };
    spec.grid = [self = *this](const Tiling& tiling) { return grid_of(self.problem, self.cut_of(tiling)); };
    spec.executed = [self = *this](const Tiling& tiling) { return executed(self.problem, self.cut_of(tiling)); };
    return spec;
  }

  std::unique_ptr<CtKernel> latent_kernel(const Tensors& tensors) const {
    auto spec = spec_of("mla_var6_plus_v4_latent", "mla_var6_plus_v4_latent.cuh", tiling.latent,
                        latent_candidates(processors_of(tiling.latent)));
    spec.problem.d = 0;
    spec.cost = hybrid_latent_cost(problem);
    spec.arguments = [at = problem, tensors](const LatentTiling& tiling) {
      auto pointer = [&](const char* name) { return tensors.count(name) ? tensors.at(name).data : nullptr; };
      return Arguments(pointer("qc"), pointer("qpe"), pointer("z"), pointer("kpe"), pointer("lengths"),
                       pointer("new_lengths"), pointer("prefix"), pointer("o_latent"), pointer("lse_latent"),
                       softmax_scale(at.d, at.p), at.b, at.h, at.s, latent_tokens(at), decompressed_tokens(at),
                       at.prefixes, int(at.ragged), tiling.parts);
    };
    return std::make_unique<CtKernel>(std::move(spec));
  }
  std::unique_ptr<CtKernel> decompressed_kernel(const Tensors& tensors) const {
    auto spec = spec_of("mla_var6_plus_v4_decompressed", "mla_var6_plus_v4_decompressed.cuh", tiling.decompressed,
                        decompressed_candidates(processors_of(tiling.decompressed)));
    spec.problem.k = 0;
    spec.cost = hybrid_decompressed_cost(problem);
    spec.arguments = [at = problem, tensors](const DecompressedTiling& tiling) {
      auto pointer = [&](const char* name) { return tensors.count(name) ? tensors.at(name).data : nullptr; };
      return Arguments(pointer("q"), pointer("qpe"), pointer("k"), pointer("v"), pointer("kpe_new"), pointer("lengths"),
                       pointer("new_lengths"), pointer("prefix"), pointer("o_new"), pointer("lse_new"),
                       softmax_scale(at.d, at.p), at.b, at.h, at.s, latent_tokens(at), decompressed_tokens(at),
                       at.prefixes, int(at.ragged), tiling.parts);
    };
    return std::make_unique<CtKernel>(std::move(spec));
  }

  // The decompressed path beside the latent one, fitted to the envelope of 2026-11-21 (an older
  // results/nvidia-h200/envelope.json): 2539 and 4818 us (sustained 2565, 4848) at s = 64 and 128. On Hopper 16 rows
  // take as long as 64; without WGMMA they are taken to reach what larger tiles do. The fit is with latent blocks that
  // own whole tiles.
  std::vector<Figures> figures() const override {
    return {{.rows = 16, .burst = 0.51 / 4, .sustained = 0.54 / 4, .memory = 0.975, .elsewhere = 0.51, .readers = 0.73},
            {.rows = 64, .burst = 0.51, .sustained = 0.54, .memory = 0.975, .readers = 0.73}};
  }
  const HybridParts& parts_of_time() const override {
    static const HybridParts parts = of_cutile({.beside = figures()});
    return parts;
  }
};

HYPERMLA_REGISTER(MlaVar6PlusV4Plan, "the hybrid as two kernels at once, each on multiprocessors of its own")

}  // namespace
}  // namespace hypermla
