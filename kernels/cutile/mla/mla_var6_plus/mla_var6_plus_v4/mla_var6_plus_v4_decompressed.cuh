// The decompressed path of the hybrid as a kernel of its own, which runs beside the latent one. Its blocks stay
// resident: each walks over the units of work (a part of the tokens for Bs queries of one head of Bb requests).
//
// grid = (blocks)
#pragma once

#include "cutile/hybrid/attend.cuh"
#include "mla_var6_plus_v4_decompressed.h"

namespace hypermla {

// q [B,H,S,D], qpe [B,H,S,P], k and v [G,H,N,D], kpe_new [G,N,P] -> o_new [parts,B,H,S,D], lse_new [parts,B,H,S]. The
// lengths and `prefix` as in mla/hybrid/hybrid_plan.h, null where the problem has none.
template <HybridProblem problem, MlaVar6PlusV4DecompressedTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy,
                     num_worker_warps_per_cta = tiling.num_warps)]] __tile_global__ void
mla_var6_plus_v4_decompressed(
    const element_t<problem.dtype>* __restrict__ q, const element_t<problem.dtype>* __restrict__ qpe,
    const element_t<problem.dtype>* __restrict__ k, const element_t<problem.dtype>* __restrict__ v,
    const element_t<problem.dtype>* __restrict__ kpe_new, const int* __restrict__ latent_lengths,
    const int* __restrict__ new_lengths, const int* __restrict__ prefix, element_t<problem.dtype>* __restrict__ o_new,
    float* __restrict__ lse_new, float scale, int b, int h, int s, int o, int n, int prefixes, int ragged, int parts) {
  constexpr DecompressedTiles tiles{tiling.Bb, tiling.Bs, tiling.Bn};
  const HybridExtents at{b, h, s, o, n, prefixes, ragged};
  const HybridLengths lengths{latent_lengths, new_lengths, prefix};
  const int block = ct::bid().x, blocks = ct::num_blocks().x;
  for (auto unit : ct::irange(block, decompressed_units(at, tiles, parts), blocks))
    attend_decompressed<problem.dtype, problem.d, problem.p, tiles, problem.causal>(
        q, qpe, k, v, kpe_new, o_new, lse_new, lengths, at, scale, parts, decompressed_unit(at, tiles, unit));
}

}  // namespace hypermla
