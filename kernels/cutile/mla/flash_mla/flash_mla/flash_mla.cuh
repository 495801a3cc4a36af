// FlashMLA: attention over the latent cache with absorbed projections (DeepSeek-V2, arXiv 2405.04434, section 2.1),
// online softmax as in FlashAttention (arXiv 2205.14135).
//
// All heads read the same latents, so the queries of all heads are rows of one matrix: row = head * s + query. A block
// owns Bm rows and Bv of the value columns and walks over the tokens Bn at a time. The queries stay in shared memory;
// the latents come in chunks of Bk columns for the scores and once more as values. Only the tiles at the causal
// diagonal and at the end of the context are masked, by a branch inside the one loop.
//
// grid = (ceil(h * s / Bm), k / Bv, b)
#pragma once

#include "flash_mla.h"
#include "tile.h"

namespace hypermla {

// qc [B,H,S,K], qpe [B,H,S,P], z [B,T,K], kpe [B,T,P] -> o [B,H,S,K], lse [B,H,S] (natural logarithm, fp32).
// A row that sees no token gets o = 0 and lse = -inf. t >= 1.
template <LatentProblem problem, FlashMlaTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy, num_worker_warps_per_cta = tiling.num_warps)]]
__tile_global__ void flash_mla(const element_t<problem.dtype>* __restrict__ qc_ptr,
                               const element_t<problem.dtype>* __restrict__ qpe_ptr,
                               const element_t<problem.dtype>* __restrict__ z_ptr,
                               const element_t<problem.dtype>* __restrict__ kpe_ptr,
                               element_t<problem.dtype>* __restrict__ o_ptr, float* __restrict__ lse_ptr, float scale,
                               int b, int h, int s, int t) {
  using Element = element_t<problem.dtype>;
  constexpr int Bm = tiling.Bm, Bn = tiling.Bn, Bv = tiling.Bv, Bk = tiling.Bk, K = problem.k, P = problem.p;
  constexpr auto dyn = ct::dynamic_extent;
  using Rows = ct::tile<float, ct::shape<Bm, 1>>;
  using Ends = ct::tile<int, ct::shape<Bm, 1>>;
  using Scores = ct::tile<float, ct::shape<Bm, Bn>>;
  // Below every real score, and finite: a row of masked scores then has weights exp2(-inf - kLowest) = 0, not NaN.
  constexpr float kLowest = -1e30f;
  // Weights below the smallest normal number may become 0; without this every exp2 pays for scaling them up and back.
  constexpr ct::round_subnormals_to_zero_t kFlush{};

  const int m = ct::bid().x, columns = ct::bid().y, batch = ct::bid().z;
  const unsigned batches = b, rows = unsigned(h) * s, tokens = t;

  ct::extents<unsigned, dyn, dyn, K> row_extents{batches, rows}, token_extents{batches, tokens};
  ct::tensor_span qc_span{ct::assume_aligned<16>(qc_ptr), row_extents};
  ct::tensor_span z_span{ct::assume_aligned<16>(z_ptr), token_extents};
  ct::tensor_span o_span{ct::assume_aligned<16>(o_ptr), row_extents};
  ct::tensor_span qpe_span{ct::assume_aligned<16>(qpe_ptr), ct::extents<unsigned, dyn, dyn, P>{batches, rows}};
  ct::tensor_span kpe_span{ct::assume_aligned<16>(kpe_ptr), ct::extents<unsigned, dyn, dyn, P>{batches, tokens}};
  ct::tensor_span lse_span{ct::assume_aligned<16>(lse_ptr), ct::extents<unsigned, dyn, dyn>{batches, rows}};
  ct::partition_view qc_view{qc_span, ct::shape<1, Bm, K>{}};
  ct::partition_view qpe_view{qpe_span, ct::shape<1, Bm, P>{}};
  ct::partition_view key_view{z_span, ct::shape<1, Bn, Bk>{}};
  ct::partition_view value_view{z_span, ct::shape<1, Bn, Bv>{}};
  ct::partition_view kpe_view{kpe_span, ct::shape<1, Bn, P>{}};
  ct::partition_view o_view{o_span, ct::shape<1, Bm, Bv>{}};
  ct::partition_view lse_view{lse_span, ct::shape<1, Bm>{}};

  auto qc = ct::reshape(qc_view.load_masked(batch, m, 0), ct::shape<Bm, K>{});                    // (Bm, K)
  auto qpe = ct::reshape(qpe_view.load_masked(batch, m, 0), ct::shape<Bm, P>{});                  // (Bm, P)
  auto row_max = ct::full<Rows>(kLowest);  // (Bm, 1), in units of log2
  auto row_sum = ct::zeros<Rows>();                                                               // (Bm, 1)
  auto acc = ct::zeros<ct::tile<float, ct::shape<Bm, Bv>>>();                                     // (Bm, Bv)
  const float scale_log2 = scale * kLog2e;

  // Query i sees the tokens below t, or below t - s + i + 1 when causal. A block that reaches over several heads holds
  // every query.
  const int first_row = m * Bm;
  const int first_query = first_row % s + Bm <= s ? first_row % s : 0;
  const int last_query = first_row % s + Bm <= s ? first_query + Bm - 1 : s - 1;
  const int seen_by_all = problem.causal ? t - s + first_query + 1 : t;
  const int seen_by_any = problem.causal ? t - s + last_query + 1 : t;
  const int whole_tiles = seen_by_all > 0 ? seen_by_all / Bn : 0;
  const int tiles = seen_by_any > 0 ? (seen_by_any + Bn - 1) / Bn : 0;

  for (auto j : ct::irange(0, tiles)) {
    auto kpe = ct::reshape(kpe_view.load_masked(batch, j, 0), ct::shape<Bn, P>{});                // (Bn, P)
    auto scores = ct::mma(qpe, ct::transpose(kpe), ct::zeros<Scores>());                          // (Bm, Bn)
    for (auto c : ct::irange(0, K / Bk)) {
      auto key = ct::reshape(key_view.load_masked(batch, j, c), ct::shape<Bn, Bk>{});             // (Bn, Bk)
      auto query = ct::extract(qc, ct::shape<Bm, Bk>{}, 0, c);                                    // (Bm, Bk)
      scores = ct::mma(query, ct::transpose(key), scores);                                        // (Bm, Bn)
    }
    auto value = ct::reshape(value_view.load_masked(batch, j, columns), ct::shape<Bn, Bv>{});     // (Bn, Bv)
    if (j >= whole_tiles) {
      auto token = ct::reshape(ct::iota<ct::tile<int, ct::shape<Bn>>>(), ct::shape<1, Bn>{}) + j * Bn;  // (1, Bn)
      auto row = ct::reshape(ct::iota<ct::tile<int, ct::shape<Bm>>>(), ct::shape<Bm, 1>{}) + first_row;  // (Bm, 1)
      auto end = problem.causal ? ct::min(row % s + (t - s + 1), ct::full<Ends>(t)) : ct::full<Ends>(t);  // (Bm, 1)
      scores = ct::select(token < end, scores, ct::full<Scores>(-kInfinity));                     // (Bm, Bn)
    }
    auto new_max = ct::max(row_max, ct::reduce_max(scores, ct::integral_constant<1>{}) * scale_log2);  // (Bm, 1)
    auto weights = ct::exp2(scores * scale_log2 - new_max, kFlush);                               // (Bm, Bn)
    auto rescale = ct::exp2(row_max - new_max, kFlush);                                           // (Bm, 1)
    row_sum = row_sum * rescale + ct::sum(weights, ct::integral_constant<1>{});                   // (Bm, 1)
    acc = ct::mma(ct::element_cast<Element>(weights), value, acc * rescale);                      // (Bm, Bv)
    row_max = new_max;                                                                            // (Bm, 1)
  }

  auto divisor = ct::select(row_sum == 0.0f, ct::full<Rows>(1.0f), row_sum);                      // (Bm, 1)
  auto o = ct::element_cast<Element>(acc * (1.0f / divisor));                                     // (Bm, Bv)
  o_view.store_masked(ct::reshape(o, ct::shape<1, Bm, Bv>{}), batch, m, columns);
  if (columns == 0) {
    auto lse = (row_max + ct::log2(row_sum)) * kLn2;                                              // (Bm, 1)
    lse_view.store_masked(ct::reshape(lse, ct::shape<1, Bm>{}), batch, m);
  }
}

}  // namespace hypermla
