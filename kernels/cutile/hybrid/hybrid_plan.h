// What the plans of the hybrid's versions share: tensors with the workspace between the stages, cost, and the pipeline. A
// version says how it cuts the work of the two paths.
#pragma once

#include <algorithm>

#include "cutile/hybrid/decompress_combine_plan.h"
#include "mla/hybrid/hybrid_plan.h"

namespace hypermla {

// How a tiling cuts the two paths. Units are what a block does at a time (attend.cuh counts them in the same way), parts are
// the cuts along the tokens, blocks the blocks of a path that walk over its units. Blocks and parts are 0 for an empty path.
struct LatentCut {
  int Bm, Bn, Bv;
  int heads;  // whose queries are rows of one matrix
  int parts = 0, blocks = 0;
};
struct DecompressedCut {
  int Bb, Bs, Bn;
  int parts = 0, blocks = 0;
};
struct HybridCut {
  LatentCut latent;
  DecompressedCut decompressed;
};

inline double units_of(const HybridProblem& at, const LatentCut& cut) {
  return double(cut.parts) * at.b * (at.h / cut.heads) * ceil_div(cut.heads * at.s, cut.Bm) * (at.k / cut.Bv);
}
inline double units_of(const HybridProblem& at, const DecompressedCut& cut) {
  return double(cut.parts) * at.h * ceil_div(at.b, cut.Bb) * ceil_div(at.s, cut.Bs);
}

// What a path executes: padded rows and tokens, the scores once more for every Bv of the value columns, partial outputs.
inline Cost executed_by(const HybridProblem& at, const LatentCut& cut) {
  const Cost cost = hybrid_latent_cost(at);
  if (cut.parts == 0) return cost;
  const double k = at.k, p = at.p, rows = double(at.b) * at.h * at.s;
  const double padded = padding(cut.heads * at.s, cut.Bm) * padding(latent_tokens(at), cut.Bn);
  return {cost.flops * padded * ((k + p) * (k / cut.Bv) + k) / (2 * k + p),
          cost.bytes + (cut.parts - 1) * rows * (dtype_bytes(at.dtype) * k + 4)};
}
inline Cost executed_by(const HybridProblem& at, const DecompressedCut& cut) {
  const Cost cost = hybrid_decompressed_cost(at);
  if (cut.parts == 0) return cost;
  const double rows = double(at.b) * at.h * at.s;
  return {cost.flops * padding(at.b, cut.Bb) * padding(at.s, cut.Bs) * padding(new_tokens(at), cut.Bn),
          cost.bytes + (cut.parts - 1) * rows * (dtype_bytes(at.dtype) * at.d + 4)};
}

// What a path takes of the blocks' time, in FLOP of an H200: attention in this language reaches 0.7 of the matrix rate
// (docs/kernels/flash-mla.md, flash-attention.md), half of that with fewer than 64 rows, which are not enough for WGMMA
// (docs/cuda-tile.md), and needs 96 of 132 SMs for the full bandwidth (docs/devices/nvidia-h200.md).
inline double path_work(const Cost& executed, int rows) {
  return std::max(executed.flops / (rows < 64 ? 0.35 : 0.7), executed.bytes * kHybridRidge * 96 / 132);
}
inline double path_work(const HybridProblem& at, const LatentCut& cut) {
  return path_work(executed_by(at, cut), cut.Bm);
}
inline double path_work(const HybridProblem& at, const DecompressedCut& cut) {
  return path_work(executed_by(at, cut), cut.Bb * cut.Bs);
}

// When the last block of a path is done, in FLOP of one block: its blocks take equally many units, or one more.
template <class Cut>
double path_end(const HybridProblem& at, const Cut& cut) {
  if (cut.blocks == 0) return 0;
  const double units = units_of(at, cut);
  return path_work(at, cut) / units * std::ceil(units / cut.blocks);
}
inline double later_end(const HybridProblem& at, const HybridCut& cut) {
  return std::max(path_end(at, cut.latent), path_end(at, cut.decompressed));
}

// Both paths; scaled by how much later the longer one ends than if all blocks ended at once.
inline Cost executed_by(const HybridProblem& at, const HybridCut& cut) {
  const Cost both = executed_by(at, cut.latent) + executed_by(at, cut.decompressed);
  const double work = path_work(at, cut.latent) + path_work(at, cut.decompressed);
  const double late = later_end(at, cut) * (cut.latent.blocks + cut.decompressed.blocks) / work;
  return {late * both.flops, late * both.bytes};
}

inline void require_parts(const char* name, int parts) {
  if (parts < 1 || parts > 1024) fail("--{}={} is not supported: it must be from 1 to 1024", name, parts);
}

// As many cuts along the tokens as let the blocks of a path end together; each cut costs a partial output.
inline int parts_for(double units, int blocks, int token_tiles) {
  int best = 1;
  auto end = [&](int parts) { return std::ceil(units * parts / blocks) * blocks / (units * parts) + 0.01 * parts; };
  for (int parts = 2; parts <= std::min(token_tiles, 16); ++parts)
    if (end(parts) < end(best)) best = parts;
  return best;
}

// Divides the blocks in proportion to the predicted times of the paths, the latent share scaled by `shift`, and cuts along the
// tokens; `cut` has one part of each path that there is.
inline HybridCut in_proportion(const HybridProblem& at, HybridCut cut, int blocks, double shift = 1) {
  LatentCut& latent = cut.latent;
  DecompressedCut& decompressed = cut.decompressed;
  const double latent_work = shift * path_work(at, latent);
  const double share = latent_work / (latent_work + path_work(at, decompressed));
  latent.blocks = latent.parts == 0         ? 0
                  : decompressed.parts == 0 ? blocks
                                            : std::clamp(int(std::lround(share * blocks)), 1, std::max(1, blocks - 1));
  decompressed.blocks = decompressed.parts == 0 ? 0 : std::max(1, blocks - latent.blocks);
  if (latent.parts)
    latent.parts = parts_for(units_of(at, latent), latent.blocks, ceil_div(latent_tokens(at), latent.Bn));
  if (decompressed.parts)
    decompressed.parts =
        parts_for(units_of(at, decompressed), decompressed.blocks, ceil_div(new_tokens(at), decompressed.Bn));
  return cut;
}

template <class Tiling>
class HybridPlan : public AttentionPlan<HybridProblem, Tiling> {
 public:
  using AttentionPlan<HybridProblem, Tiling>::problem;
  using AttentionPlan<HybridProblem, Tiling>::tiling;
  using AttentionPlan<HybridProblem, Tiling>::target;

  void use_default_tiling() override {
    if (has_extents(problem)) tiling = candidates().front();  // else validate() says what is wrong
  }

  std::vector<TensorSpec> tensors() const override {
    std::vector<TensorSpec> all = tensors_of(problem);
    const auto cut = cutting();
    HybridCut most = cut(tiling);
    for (const Tiling& candidate : candidates()) {
      const HybridCut one = cut(candidate);
      most.latent.parts = std::max(most.latent.parts, one.latent.parts);
      most.decompressed.parts = std::max(most.decompressed.parts, one.decompressed.parts);
    }
    for (TensorSpec& spec : tensors_of(combine_problem(most))) {
      if (spec.role != Role::input || spec.name == "w") continue;
      spec.role = Role::workspace;
      all.push_back(std::move(spec));
    }
    return all;
  }

 protected:
  virtual std::vector<Tiling> candidates() const = 0;
  // How a tiling cuts the problem, as a function that outlives the plan.
  virtual std::function<HybridCut(const Tiling&)> cutting() const = 0;

  // What a tiling with these fields makes of a cut that lacks parts and blocks: none for a path without tokens, and no more
  // blocks than units.
  static HybridCut with_blocks(const HybridProblem& at, HybridCut cut, int latent_parts, int latent_blocks,
                               int decompressed_parts, int decompressed_blocks) {
    if (latent_tokens(at)) {
      cut.latent.parts = latent_parts;
      cut.latent.blocks = int(std::min<double>(latent_blocks, units_of(at, cut.latent)));
    }
    if (new_tokens(at)) {
      cut.decompressed.parts = decompressed_parts;
      cut.decompressed.blocks = int(std::min<double>(decompressed_blocks, units_of(at, cut.decompressed)));
    }
    return cut;
  }

  // The tiling of one kernel for both paths, and how it divides its blocks and cuts the tokens.
  void validate_tiles() const {
    require_power_of_two("Bm", tiling.Bm, 16, 128);
    require_power_of_two("Bn", tiling.Bn, 16, 256);
    require_power_of_two("Bv", tiling.Bv, 16, problem.k);
    require_power_of_two("Bk", tiling.Bk, 16, problem.k);
    require_power_of_two("num_warps", tiling.num_warps, 1, 32);
    require_positive("occupancy", tiling.occupancy);
  }
  void validate_division() const {
    require_positive("latent_blocks", tiling.latent_blocks);
    require_positive("new_blocks", tiling.new_blocks);
    require_parts("latent_parts", tiling.latent_parts);
    require_parts("new_parts", tiling.new_parts);
  }
  // The kernel learns its division at run time.
  static Tiling undivided(Tiling tiling) {
    tiling.latent_blocks = tiling.new_blocks = tiling.latent_parts = tiling.new_parts = 0;
    return tiling;
  }
  // Divided as the model says, the latent share scaled by `shift`.
  Tiling divided(Tiling tiling, double shift = 1) const {
    tiling.latent_blocks = tiling.new_blocks = tiling.latent_parts = tiling.new_parts = 1;
    const HybridCut cut = in_proportion(problem, cutting()(tiling), target.processors, shift);
    tiling.latent_blocks = std::max(1, cut.latent.blocks);
    tiling.new_blocks = std::max(1, cut.decompressed.blocks);
    tiling.latent_parts = std::max(1, cut.latent.parts);
    tiling.new_parts = std::max(1, cut.decompressed.parts);
    return tiling;
  }
  // The model's division leads; it knows neither what a block can read alone nor the clock under load.
  std::vector<Tiling> divisions(const Tiling& tiling) const {
    std::vector<Tiling> tilings;
    for (const double shift : {1.0, 0.8, 1.25}) {
      tilings.push_back(divided(tiling, shift));
      tilings.push_back(tilings.back());
      tilings.back().latent_parts = tilings.back().new_parts = 1;
    }
    return tilings;
  }

  // The tensors in the order in which every attention kernel takes them; null where the problem has none.
  static std::vector<void*> pointers(const Tensors& tensors) {
    std::vector<void*> all;
    for (const char* name : {"q", "qc", "qpe", "z", "kpe", "k", "v", "kpe_new", "lengths", "new_lengths", "prefix",
                             "o_latent", "lse_latent", "o_new", "lse_new"})
      all.push_back(tensors.count(name) ? tensors.at(name).data : nullptr);
    return all;
  }

  CombineProblem combine_problem(const HybridCut& cut) const {
    return {.b = problem.b,
            .s = problem.s,
            .h = problem.h,
            .d = problem.d,
            .k = problem.k,
            .dtype = problem.dtype,
            .latent_parts = cut.latent.parts,
            .decompressed_parts = cut.decompressed.parts,
            .tokens_first = problem.tokens_first};
  }

  HybridProblem at_compile_time() const {
    HybridProblem at{};
    at.b = at.s = at.t = at.n = at.h = 0;
    at.d = problem.d;
    at.p = problem.p;
    at.k = problem.k;
    at.dtype = problem.dtype;
    at.causal = problem.causal;
    return at;
  }

  // One kernel whose first blocks do latent work and whose others do decompressed work.
  std::unique_ptr<CtKernel> specialized_attention(const Tensors& tensors, const std::string& name,
                                                  const std::string& header,
                                                  std::function<Tiling(Tiling)> compiled_tiling) const {
    CtKernelSpec<HybridProblem, Tiling> spec;
    spec.name = name;
    spec.header = header;
    spec.problem = at_compile_time();
    spec.tiling = tiling;
    spec.candidates = candidates();
    spec.cost = hybrid_attention_cost(problem);
    spec.at_compile_time = std::move(compiled_tiling);
    spec.grid = [cut = cutting()](const Tiling& tiling) {
      const HybridCut at = cut(tiling);
      return Grid{unsigned(at.latent.blocks + at.decompressed.blocks), 1, 1};
    };
    spec.arguments = [at = problem, cut = cutting(), all = pointers(tensors)](const Tiling& tiling) {
      const HybridCut now = cut(tiling);
      return Arguments(all[0], all[1], all[2], all[3], all[4], all[5], all[6], all[7], all[8], all[9], all[10], all[11],
                       all[12], all[13], all[14], softmax_scale(at.d, at.p), at.b, at.h, at.s, latent_tokens(at),
                       new_tokens(at), at.prefixes, int(at.ragged), now.latent.parts, now.latent.blocks,
                       now.decompressed.parts);
    };
    spec.executed = [at = problem, cut = cutting()](const Tiling& tiling) { return executed_by(at, cut(tiling)); };
    return std::make_unique<CtKernel>(std::move(spec));
  }

  // The stage that merges what an attention kernel leaves, in as many parts as its present tiling makes.
  std::unique_ptr<CtKernel> combine(const Tensors& tensors, const CtKernel& attention,
                                    const DecompressCombineTiling* only = nullptr) const {
    auto parts = [&attention, cut = cutting()] {
      const HybridCut now = cut(fields_from_json<Tiling>(attention.tiling()));
      return CombineParts{now.latent.parts, now.decompressed.parts};
    };
    const CombineProblem at = combine_problem(cutting()(tiling));
    const std::vector<DecompressCombineTiling> tilings = only ? std::vector{*only} : combine_candidates(at, target);
    return combine_kernel(at, tilings.front(), tilings, tensors, parts);
  }

  std::unique_ptr<Executable> specialized_pipeline(const Tensors& tensors, const std::string& name,
                                                   const std::string& header,
                                                   std::function<Tiling(Tiling)> compiled_tiling,
                                                   const DecompressCombineTiling* only_combine = nullptr) const {
    std::unique_ptr<CtKernel> attention = specialized_attention(tensors, name, header, std::move(compiled_tiling));
    std::unique_ptr<CtKernel> combined = combine(tensors, *attention, only_combine);
    std::vector<std::unique_ptr<Executable>> stages;
    stages.push_back(std::move(attention));
    stages.push_back(std::move(combined));
    return std::make_unique<KernelPipeline>(name, std::move(stages));
  }
};

}  // namespace hypermla
