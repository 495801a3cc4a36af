// FlashMLA: attention over the latent cache with absorbed projections (DeepSeek-V2, arXiv 2405.04434, section 2.1). A
// block owns Bm rows, queries of all heads, and Bv of the value columns, and walks over the tokens Bn at a time.
//
// With Bh heads to a matrix, blocks do not reach over the heads of two matrices.
//
// grid = (ceil(h * s / Bm), k / Bv, b), or with Bh (h / Bh * ceil(Bh * s / Bm), k / Bv, b)
#pragma once

#include "cutile/hybrid/attend.cuh"
#include "flash_mla.h"

namespace hypermla {

// qc [B,H,S,K], qpe [B,H,S,P], z [B,T,K], kpe [B,T,P] -> o [B,H,S,K], lse [B,H,S] (natural logarithm, fp32). t >= 1.
template <LatentProblem problem, FlashMlaTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy, num_worker_warps_per_cta = tiling.num_warps,
                     num_cta_in_cga = tiling.num_ctas)]] __tile_global__ void
flash_mla(const element_t<problem.dtype>* __restrict__ qc, const element_t<problem.dtype>* __restrict__ qpe,
          const element_t<problem.dtype>* __restrict__ z, const element_t<problem.dtype>* __restrict__ kpe,
          element_t<problem.dtype>* __restrict__ o, float* __restrict__ lse, float scale, int b, int h, int s, int t) {
  constexpr LatentTiles tiles{tiling.Bm, tiling.Bn, tiling.Bv, tiling.Bk};
  const int m = ct::bid().x, columns = ct::bid().y, request = ct::bid().z;
  const HybridExtents at{b, h, s, t, 0, 0, 0};
  if constexpr (tiling.Bh == 0) {
    attend_latent<problem.dtype, problem.k, problem.p, tiles, problem.causal, true>(
        qc, qpe, z, kpe, o, lse, HybridLengths{}, at, scale, LatentWork{h, b, 1},
        LatentUnit{request, request, m, columns, 0});
  } else {
    const LatentWork of = latent_work(at, tiling.Bh, 1);
    const int row_blocks = (tiling.Bh * s + tiling.Bm - 1) / tiling.Bm,
              group = request * (h / tiling.Bh) + m / row_blocks;
    attend_latent<problem.dtype, problem.k, problem.p, tiles, problem.causal, true>(
        qc, qpe, z, kpe, o, lse, HybridLengths{}, at, scale, of,
        LatentUnit{request, group, m % row_blocks, columns, 0});
  }
}

}  // namespace hypermla
