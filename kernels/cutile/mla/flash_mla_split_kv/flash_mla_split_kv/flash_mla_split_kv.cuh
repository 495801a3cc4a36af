// First stage of FlashMLA with split tokens (Flash-Decoding): when batch times rows fill too few multiprocessors, the
// context is cut into `splits` parts and each is attended to on its own. flash_mla_split_kv_reduce merges the parts.
//
// A block owns Bm rows, queries of all heads, Bv of the value columns and one part of the tokens. A part may be empty;
// it then writes o = 0 and lse = -inf.
//
// grid = (ceil(h * s / Bm), k / Bv, splits * b)
#pragma once

#include "cutile/hybrid/attend.cuh"
#include "flash_mla_split_kv.h"

namespace hypermla {

// qc [B,H,S,K], qpe [B,H,S,P], z [B,T,K], kpe [B,T,P] -> o_part [splits,B,H,S,K], lse_part [splits,B,H,S] (natural
// logarithm, fp32). t >= 1. The parts have the element type of the inputs: as fp32 they would slow the token loop down
// 1.75 times, because the larger tile to store takes shared memory from the loads.
template <LatentProblem problem, FlashMlaSplitKvTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy,
                     num_worker_warps_per_cta = tiling.num_warps)]] __tile_global__ void
flash_mla_split_kv(const element_t<problem.dtype>* __restrict__ qc, const element_t<problem.dtype>* __restrict__ qpe,
                   const element_t<problem.dtype>* __restrict__ z, const element_t<problem.dtype>* __restrict__ kpe,
                   element_t<problem.dtype>* __restrict__ o_part, float* __restrict__ lse_part, float scale, int b,
                   int h, int s, int t, int splits) {
  constexpr LatentTiles tiles{tiling.Bm, tiling.Bn, tiling.Bv, tiling.Bk};
  const int m = ct::bid().x, columns = ct::bid().y, request = int(ct::bid().z) % b, part = int(ct::bid().z) / b;
  attend_latent<problem.dtype, problem.k, problem.p, tiles, problem.causal, true>(
      qc, qpe, z, kpe, o_part, lse_part, HybridLengths{}, HybridExtents{b, h, s, t, 0, 0, 0}, scale,
      LatentWork{h, b, splits}, LatentUnit{request, request, m, columns, part});
}

}  // namespace hypermla
