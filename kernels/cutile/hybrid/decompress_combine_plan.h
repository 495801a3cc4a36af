// decompress_combine as a stage: what its own plan and the pipelines of the hybrid share.
#pragma once

#include "cutile/hybrid/decompress_combine.h"
#include "mla/combine/combine_plan.h"

namespace hypermla {

inline void validate_combine_tiling(const CombineProblem& problem, const DecompressCombineTiling& tiling) {
  require_power_of_two("Bb", tiling.Bb, 1, 256);
  require_power_of_two("Bs", tiling.Bs, 1, 256);
  require_power_of_two("Bd", tiling.Bd, 16, problem.d);
  require_power_of_two("Bk", tiling.Bk, 16, problem.k);
  require_power_of_two("num_warps", tiling.num_warps, 1, 32);
  require_positive("occupancy", tiling.occupancy);
  if (tiling.Bb * tiling.Bs < 16)
    fail("--Bb={} --Bs={} is not supported: a block needs at least 16 rows", tiling.Bb, tiling.Bs);
}

// {rows, Bd, Bk, num_warps, occupancy}: the best first guess leads, the tuner measures the others. A block covers as
// many queries of a batch element as there are, and fills up with batch elements.
inline std::vector<DecompressCombineTiling> combine_candidates(const CombineProblem& problem, const Target& target) {
  std::vector<DecompressCombineTiling> tilings;
  auto add = [&](int rows, int Bd, int Bk, int num_warps, int occupancy) {
    int Bs = std::min(int(std::bit_ceil(unsigned(std::max(problem.s, 1)))), rows);
    if (!target.is_gpu() && Bs > 1) Bs = Bs <= 16 ? 16 : 64;  // fewer kernels to compile
    tilings.push_back({rows / Bs, Bs, std::min(Bd, problem.d), std::min(Bk, problem.k), num_warps, occupancy});
  };
  if (!target.is_gpu()) {
    add(64, 128, 64, 1, 1);
  } else if (problem.s == 1) {
    add(32, 128, 64, 4, 2);
    add(64, 128, 64, 4, 2);
    add(16, 128, 64, 4, 3);
  } else {
    add(64, 128, 32, 4, 2);
    add(64, 128, 64, 4, 2);
    if (target.has_large_blocks()) add(128, 128, 64, 8, 1);
  }
  return tilings;
}

// The numbers of parts follow from the tiling of the stage before, so they are asked for when the kernel is launched.
struct CombineParts {
  int latent, decompressed;
};

// Inputs and outputs by the names of tensors_of(CombineProblem); those of a kind
// that has no parts may be absent.
inline std::unique_ptr<CtKernel> combine_kernel(const CombineProblem& at, const DecompressCombineTiling& tiling,
                                                std::vector<DecompressCombineTiling> candidates, const Tensors& tensors,
                                                std::function<CombineParts()> parts) {
  CtKernelSpec<CombineProblem, DecompressCombineTiling> spec;
  spec.name = "decompress_combine";
  spec.header = "cutile/hybrid/decompress_combine.cuh";
  spec.problem = {.b = 0,
                  .s = 0,
                  .h = 0,
                  .d = at.d,
                  .k = at.k,
                  .dtype = at.dtype,
                  .latent_parts = 0,
                  .decompressed_parts = 0,
                  .tokens_first = at.tokens_first};
  spec.tiling = tiling;
  spec.candidates = std::move(candidates);
  spec.cost = combine_cost(at);
  spec.grid = [at](const DecompressCombineTiling& tiling) {
    return Grid{ceil_div(at.b, tiling.Bb) * ceil_div(at.s, tiling.Bs), unsigned(at.h), unsigned(at.d / tiling.Bd)};
  };
  spec.arguments = [at, tensors, parts](const DecompressCombineTiling&) {
    auto pointer = [&](const char* name) { return tensors.count(name) ? tensors.at(name).data : nullptr; };
    const CombineParts now = parts();
    return Arguments(pointer("o_latent"), pointer("lse_latent"), pointer("o_new"), pointer("lse_new"), pointer("w"),
                     pointer("o"), pointer("lse"), at.b, at.h, at.s, now.latent, now.decompressed);
  };
  // Padded rows are computed too, and every latent part goes through the product.
  spec.executed = [at, cost = spec.cost](const DecompressCombineTiling& tiling) {
    const double again = std::max(at.latent_parts - 1, 0) * 2.0 * at.b * at.h * at.s * at.k * at.d;
    return Cost{(cost.flops + again) * padding(at.b, tiling.Bb) * padding(at.s, tiling.Bs), cost.bytes};
  };
  return std::make_unique<CtKernel>(std::move(spec));
}

}  // namespace hypermla
