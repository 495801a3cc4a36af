// First stage of the hybrid, attention_block_specialized: the first blocks of the launch attend to latent tokens, the
// others to decompressed tokens, each walking over the units of its path. decompress_combine merges what they leave.
// How the blocks are divided, into what parts the tokens are cut, and the queries of how many heads are rows of one
// latent product is the plan's.
//
// grid = (latent blocks + decompressed blocks)
#pragma once

#include "cutile/hybrid/attend.cuh"
#include "cutile/hybrid/attend_both_paths.h"

namespace hypermla {

// Tensors as in mla/hybrid/hybrid_plan.h; null where the problem has none. Partial outputs: o_latent [parts,B,H,S,K],
// lse_latent [parts,B,H,S], o_new [parts,B,H,S,D], lse_new [parts,B,H,S].
template <HybridProblem problem, AttendBothPathsTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy,
                     num_worker_warps_per_cta = tiling.num_warps)]] __tile_global__ void
attend_both_paths(const element_t<problem.dtype>* __restrict__ q, const element_t<problem.dtype>* __restrict__ qc,
                  const element_t<problem.dtype>* __restrict__ qpe, const element_t<problem.dtype>* __restrict__ z,
                  const element_t<problem.dtype>* __restrict__ kpe, const element_t<problem.dtype>* __restrict__ k,
                  const element_t<problem.dtype>* __restrict__ v, const element_t<problem.dtype>* __restrict__ kpe_new,
                  const int* __restrict__ latent_lengths, const int* __restrict__ new_lengths,
                  const int* __restrict__ prefix, element_t<problem.dtype>* __restrict__ o_latent,
                  float* __restrict__ lse_latent, element_t<problem.dtype>* __restrict__ o_new,
                  float* __restrict__ lse_new, float scale, int b, int h, int s, int o, int n, int prefixes, int ragged,
                  int heads, int latent_parts, int latent_blocks, int new_parts) {
  constexpr LatentTiles latent{tiling.Bm, tiling.Bn, tiling.Bv, tiling.Bk};
  constexpr DecompressedTiles decompressed{tiling.new_Bb, tiling.new_Bs, tiling.new_Bn};
  const HybridExtents at{b, h, s, o, n, prefixes, ragged};
  const HybridLengths lengths{latent_lengths, new_lengths, prefix};
  const int block = ct::bid().x, blocks = ct::num_blocks().x;
  if (block < latent_blocks) {
    const LatentWork of = latent_work(at, heads, latent_parts);
    for (auto unit : ct::irange(block, latent_units(at, of, latent, problem.k), latent_blocks))
      attend_latent<problem.dtype, problem.k, problem.p, latent, problem.causal>(
          qc, qpe, z, kpe, o_latent, lse_latent, lengths, at, scale, of, latent_unit(at, of, latent, problem.k, unit));
  } else {
    const int units = decompressed_units(at, decompressed, new_parts);
    for (auto unit : ct::irange(block - latent_blocks, units, blocks - latent_blocks))
      attend_decompressed<problem.dtype, problem.d, problem.p, decompressed, problem.causal>(
          q, qpe, k, v, kpe_new, o_new, lse_new, lengths, at, scale, new_parts,
          decompressed_unit(at, decompressed, unit));
  }
}

}  // namespace hypermla
