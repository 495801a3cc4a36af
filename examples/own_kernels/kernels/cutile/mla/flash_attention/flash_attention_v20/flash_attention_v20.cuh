// flash_attention with the heads side by side: blocks that start together then belong to other heads and the same
// queries, and read the same RoPE keys, which all heads share.
//
// grid = (h, ceil(s / Bm), b)
#include "cutile/hybrid/attend.cuh"
#include "flash_attention_v20.h"

namespace hypermla {

// q [B,H,S,D], qpe [B,H,S,P], k and v [B,H,T,D], kpe [B,T,P] -> o [B,H,S,D], lse [B,H,S] (natural logarithm, fp32).
// A query that sees no token gets o = 0 and lse = -inf. t >= 1.
template <DecompressedProblem problem, FlashAttentionV20Tiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy,
                     num_worker_warps_per_cta = tiling.num_warps)]] __tile_global__ void
flash_attention_v20(const element_t<problem.dtype>* __restrict__ q, const element_t<problem.dtype>* __restrict__ qpe,
                    const element_t<problem.dtype>* __restrict__ k, const element_t<problem.dtype>* __restrict__ v,
                    const element_t<problem.dtype>* __restrict__ kpe, element_t<problem.dtype>* __restrict__ o,
                    float* __restrict__ lse, float scale, int b, int h, int s, int t) {
  constexpr DecompressedTiles tiles{1, tiling.Bm, tiling.Bn};
  // Causal blocks late in the sequence see more tokens: they start first so that the last wave is made of short ones.
  const int m = problem.causal ? int(ct::num_blocks().y) - 1 - int(ct::bid().y) : int(ct::bid().y);
  const int head = ct::bid().x, request = ct::bid().z;
  attend_decompressed<problem.dtype, problem.d, problem.p, tiles, problem.causal, true>(
      q, qpe, k, v, kpe, o, lse, HybridLengths{}, HybridExtents{b, h, s, 0, t, 0, 0}, scale, 1,
      DecompressedUnit{request, head, m, 0});
}

}  // namespace hypermla
