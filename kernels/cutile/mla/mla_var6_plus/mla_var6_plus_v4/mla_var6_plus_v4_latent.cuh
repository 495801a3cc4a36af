// The latent path of the hybrid as a kernel of its own, which runs beside the decompressed one. Its blocks stay
// resident: each walks over the units of work (a part of the tokens of one request for Bm rows), so that a fixed number
// of blocks, its budget, leaves the other SMs to the other kernel.
//
// grid = (blocks)
#pragma once

#include "cutile/hybrid/attend.cuh"
#include "mla_var6_plus_v4_latent.h"

namespace hypermla {

// qc [B,H,S,K], qpe [B,H,S,P], z [B,O,K], kpe [B,O,P] -> o_latent [parts,B,H,S,K], lse_latent [parts,B,H,S]. The
// lengths and `prefix` as in mla/hybrid/hybrid_plan.h, null where the problem has none.
template <HybridProblem problem, MlaVar6PlusV4LatentTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy,
                     num_worker_warps_per_cta = tiling.num_warps)]] __tile_global__ void
mla_var6_plus_v4_latent(const element_t<problem.dtype>* __restrict__ qc,
                        const element_t<problem.dtype>* __restrict__ qpe,
                        const element_t<problem.dtype>* __restrict__ z,
                        const element_t<problem.dtype>* __restrict__ kpe, const int* __restrict__ latent_lengths,
                        const int* __restrict__ new_lengths, const int* __restrict__ prefix,
                        element_t<problem.dtype>* __restrict__ o_latent, float* __restrict__ lse_latent, float scale,
                        int b, int h, int s, int o, int n, int prefixes, int ragged, int parts) {
  constexpr LatentTiles tiles{tiling.Bm, tiling.Bn, tiling.Bv, tiling.Bk};
  const HybridExtents at{b, h, s, o, n, prefixes, ragged};
  const HybridLengths lengths{latent_lengths, new_lengths, prefix};
  const int block = ct::bid().x, blocks = ct::num_blocks().x;
  const LatentWork of = latent_work(at, h, parts);
  for (auto unit : ct::irange(block, latent_units(at, of, tiles, problem.k), blocks))
    attend_latent<problem.dtype, problem.k, problem.p, tiles, problem.causal>(
        qc, qpe, z, kpe, o_latent, lse_latent, lengths, at, scale, of, latent_unit(at, of, tiles, problem.k, unit));
}

}  // namespace hypermla
