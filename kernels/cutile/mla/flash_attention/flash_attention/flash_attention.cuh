// FlashAttention (Dao et al., arXiv 2205.14135; online softmax) over decompressed keys and values with a separate RoPE
// part whose keys all heads share (DeepSeek-V2, arXiv 2405.04434).
//
// One block owns Bm queries of one head and walks over the tokens Bn at a time. Tiles that no query of the block sees
// are not visited, and only those at the causal diagonal and at the end of the context are masked. That is a branch
// inside one loop, not a second loop: on sm_90 a loop per kind of tile costs 4 to 15 %, because each holds load buffers
// of its own. Steps are written out, not put into lambdas: captured views lose their aliasing guarantee and with it
// TMA.
//
// grid = (ceil(s / Bm), h, b)
#pragma once

#include "flash_attention.h"
#include "tile.h"

namespace hypermla {

// q [B,H,S,D], qpe [B,H,S,P], k and v [B,H,T,D], kpe [B,T,P] -> o [B,H,S,D], lse [B,H,S] (natural logarithm, fp32).
// A query that sees no token gets o = 0 and lse = -inf. t >= 1.
template <DecompressedProblem problem, FlashAttentionTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy, num_worker_warps_per_cta = tiling.num_warps)]]
__tile_global__ void flash_attention(const element_t<problem.dtype>* __restrict__ q_ptr,
                                     const element_t<problem.dtype>* __restrict__ qpe_ptr,
                                     const element_t<problem.dtype>* __restrict__ k_ptr,
                                     const element_t<problem.dtype>* __restrict__ v_ptr,
                                     const element_t<problem.dtype>* __restrict__ kpe_ptr,
                                     element_t<problem.dtype>* __restrict__ o_ptr, float* __restrict__ lse_ptr,
                                     float scale, int b, int h, int s, int t) {
  using Element = element_t<problem.dtype>;
  constexpr int Bm = tiling.Bm, Bn = tiling.Bn, D = problem.d, P = problem.p;
  constexpr auto dyn = ct::dynamic_extent;
  using Rows = ct::tile<float, ct::shape<Bm, 1>>;
  using Ends = ct::tile<int, ct::shape<Bm, 1>>;
  using Scores = ct::tile<float, ct::shape<Bm, Bn>>;
  // Below every real score, and finite: a row of masked scores then has weights exp2(-inf - kLowest) = 0, not NaN.
  constexpr float kLowest = -1e30f;
  // Weights below the smallest normal number may become 0; without this every exp2 pays for scaling them up and back.
  constexpr ct::round_subnormals_to_zero_t kFlush{};

  // Causal blocks late in the sequence see more tokens: they start first so that the last wave is made of short ones.
  const int m = problem.causal ? int(ct::num_blocks().x) - 1 - int(ct::bid().x) : int(ct::bid().x);
  const int batch = ct::bid().z;
  const int head = batch * h + int(ct::bid().y);  // of all heads of all batch elements
  const unsigned heads = unsigned(b) * h, queries = s, tokens = t;

  ct::extents<unsigned, dyn, dyn, D> query_extents{heads, queries}, token_extents{heads, tokens};
  ct::partition_view q_view{ct::tensor_span{ct::assume_aligned<16>(q_ptr), query_extents}, ct::shape<1, Bm, D>{}};
  ct::partition_view k_view{ct::tensor_span{ct::assume_aligned<16>(k_ptr), token_extents}, ct::shape<1, Bn, D>{}};
  ct::partition_view v_view{ct::tensor_span{ct::assume_aligned<16>(v_ptr), token_extents}, ct::shape<1, Bn, D>{}};
  ct::partition_view o_view{ct::tensor_span{ct::assume_aligned<16>(o_ptr), query_extents}, ct::shape<1, Bm, D>{}};
  ct::partition_view qpe_view{
      ct::tensor_span{ct::assume_aligned<16>(qpe_ptr), ct::extents<unsigned, dyn, dyn, P>{heads, queries}},
      ct::shape<1, Bm, P>{}};
  ct::partition_view kpe_view{
      ct::tensor_span{ct::assume_aligned<16>(kpe_ptr), ct::extents<unsigned, dyn, dyn, P>{unsigned(b), tokens}},
      ct::shape<1, Bn, P>{}};
  ct::partition_view lse_view{
      ct::tensor_span{ct::assume_aligned<16>(lse_ptr), ct::extents<unsigned, dyn, dyn>{heads, queries}},
      ct::shape<1, Bm>{}};

  auto q = ct::reshape(q_view.load_masked(head, m, 0), ct::shape<Bm, D>{});                       // (Bm, D)
  auto qpe = ct::reshape(qpe_view.load_masked(head, m, 0), ct::shape<Bm, P>{});                   // (Bm, P)
  auto row_max = ct::full<Rows>(kLowest);  // (Bm, 1), in units of log2
  auto row_sum = ct::zeros<Rows>();                                                               // (Bm, 1)
  auto acc = ct::zeros<ct::tile<float, ct::shape<Bm, D>>>();                                      // (Bm, D)
  const float scale_log2 = scale * kLog2e;

  // Query i sees the tokens below t, or below t - s + i + 1 when causal.
  const int first_query = m * Bm;
  const int seen_by_all = problem.causal ? t - s + first_query + 1 : t;
  const int seen_by_any = problem.causal ? (t - s + first_query + Bm < t ? t - s + first_query + Bm : t) : t;
  const int whole_tiles = seen_by_all > 0 ? seen_by_all / Bn : 0;
  const int tiles = seen_by_any > 0 ? (seen_by_any + Bn - 1) / Bn : 0;

  for (auto j : ct::irange(0, tiles)) {
    auto k = ct::reshape(k_view.load_masked(head, j, 0), ct::shape<Bn, D>{});                     // (Bn, D)
    auto kpe = ct::reshape(kpe_view.load_masked(batch, j, 0), ct::shape<Bn, P>{});                // (Bn, P)
    auto v = ct::reshape(v_view.load_masked(head, j, 0), ct::shape<Bn, D>{});                     // (Bn, D)
    auto scores = ct::mma(q, ct::transpose(k), ct::zeros<Scores>());                              // (Bm, Bn)
    scores = ct::mma(qpe, ct::transpose(kpe), scores);                                            // (Bm, Bn)
    if (j >= whole_tiles) {
      auto token = ct::reshape(ct::iota<ct::tile<int, ct::shape<Bn>>>(), ct::shape<1, Bn>{}) + j * Bn;  // (1, Bn)
      auto query = ct::reshape(ct::iota<ct::tile<int, ct::shape<Bm>>>(), ct::shape<Bm, 1>{}) + first_query;  // (Bm, 1)
      auto end = problem.causal ? ct::min(query + (t - s + 1), ct::full<Ends>(t)) : ct::full<Ends>(t);  // (Bm, 1)
      scores = ct::select(token < end, scores, ct::full<Scores>(-kInfinity));                     // (Bm, Bn)
    }
    auto new_max = ct::max(row_max, ct::reduce_max(scores, ct::integral_constant<1>{}) * scale_log2);  // (Bm, 1)
    auto weights = ct::exp2(scores * scale_log2 - new_max, kFlush);                               // (Bm, Bn)
    auto rescale = ct::exp2(row_max - new_max, kFlush);                                           // (Bm, 1)
    row_sum = row_sum * rescale + ct::sum(weights, ct::integral_constant<1>{});                   // (Bm, 1)
    acc = ct::mma(ct::element_cast<Element>(weights), v, acc * rescale);                          // (Bm, D)
    row_max = new_max;                                                                            // (Bm, 1)
  }

  auto divisor = ct::select(row_sum == 0.0f, ct::full<Rows>(1.0f), row_sum);                      // (Bm, 1)
  auto o = ct::element_cast<Element>(acc * (1.0f / divisor));                                     // (Bm, D)
  auto lse = (row_max + ct::log2(row_sum)) * kLn2;                                                // (Bm, 1)
  o_view.store_masked(ct::reshape(o, ct::shape<1, Bm, D>{}), head, m, 0);
  lse_view.store_masked(ct::reshape(lse, ct::shape<1, Bm>{}), head, m);
}

}  // namespace hypermla
