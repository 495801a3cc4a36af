// What the plans of the hybrid's versions share: tensors with the workspace between the stages, cost, and the pipeline.
// A version says how it cuts the work of the two paths.
#pragma once

#include <algorithm>

#include "cutile/hybrid/decompress_combine_plan.h"
#include "cutile/hybrid/parts_time.h"

namespace hypermla {

// How a tiling cuts the two paths. Units are what a block does at a time (attend.cuh counts them in the same way),
// parts are the cuts along the tokens, blocks the blocks of a path that walk over its units. Blocks and parts are 0 for
// an empty path.
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

// What a path executes: padded rows and tokens, the scores once more for every Bv of the value columns, partial
// outputs.
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
  return {cost.flops * padding(at.b, cut.Bb) * padding(at.s, cut.Bs) * padding(decompressed_tokens(at), cut.Bn),
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

// Divides the blocks in proportion to the predicted times of the paths, the latent share scaled by `shift`, and cuts
// along the tokens; `cut` has one part of each path that there is.
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
        parts_for(units_of(at, decompressed), decompressed.blocks, ceil_div(decompressed_tokens(at), decompressed.Bn));
  return cut;
}

template <class Tiling>
class HybridPlan : public TimedHybridPlan<Tiling> {
 public:
  using AttentionPlan<HybridProblem, Tiling>::problem;
  using AttentionPlan<HybridProblem, Tiling>::tiling;
  using AttentionPlan<HybridProblem, Tiling>::target;

  void use_default_tiling() override {
    if (!has_extents(problem)) return;
    if (const std::vector<Tiling> all = candidates(); !all.empty()) tiling = all.front();
    // Else validate() says what is wrong.
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
};

}  // namespace hypermla
