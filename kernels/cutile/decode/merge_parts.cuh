// Merges the parts that attend_pages.cuh leaves of every query and head, by their log-sum-exp. Outputs of queries
// that belong to no request are not written.
//
// grid = (all_queries, ceil(heads / Bh))
#pragma once

#include "cutile/weighted_rows.cuh"
#include "decode.h"
#include "cutile/strided_view.cuh"

namespace hypermla {

// o_part [all_queries, parts, heads, 512], lse_part [all_queries, parts, heads] in units of log2, step and request_of
// as plan_step() leaves them, sinks [heads] or nothing -> o and lse by their strides. lse_unit: what one unit of log2
// is; empty_lse: of a query that sees no token. P: the most parts; Bp: those of one load.
template <DType dtype, int P, int Bp, int Bh>
[[using cutile: hint(0, num_worker_warps_per_cta = 4)]] __tile_global__ void merge_parts(
    const element_t<dtype>* __restrict__ o_part, const float* __restrict__ lse_part, const int* __restrict__ step,
    const int* __restrict__ request_of, const float* __restrict__ sinks, element_t<dtype>* __restrict__ o_ptr,
    float* __restrict__ lse_ptr, int has_sinks, int heads, int all_queries, int parts, float lse_unit, float empty_lse,
    long long o_token, long long o_head, long long lse_token, long long lse_head, long long lse_request) {
  using Element = element_t<dtype>;
  using Rows = ct::tile<float, ct::shape<1, Bh, 1>>;
  constexpr int K = kDecodeLatent;
  constexpr auto dyn = ct::dynamic_extent;
  constexpr ct::integral_constant<0> over_parts;

  const int token = ct::bid().x, behind = (heads + Bh - 1) / Bh;
  const int request = request_of[token];
  const int head_tile = request < 0 ? behind : int(ct::bid().y);  // see attend_pages.cuh
  ct::extents<unsigned, dyn> head_extents{unsigned(heads)};
  ct::extents<unsigned, dyn, dyn, dyn> lse_extents{unsigned(all_queries), unsigned(parts), unsigned(heads)};
  ct::extents<unsigned, dyn, dyn, dyn, K> part_extents{unsigned(all_queries), unsigned(parts), unsigned(heads)};
  ct::tensor_span lse_span{lse_part, lse_extents};
  ct::partition_view all_view{lse_span, ct::shape<1, P, Bh>{}};
  ct::partition_view lse_view{lse_span, ct::shape<1, Bp, Bh>{}};
  ct::partition_view part_view{ct::tensor_span{ct::assume_aligned<16>(o_part), part_extents},
                               ct::shape<1, Bp, Bh, K>{}};

  auto all_lse = ct::reshape(all_view.template load_masked<ct::view_padding::negative_inf>(token, 0, head_tile),
                             ct::shape<P, Bh, 1>{});                     // (P, Bh, 1)
  auto lse_max = ct::max(ct::reduce_max(all_lse, over_parts), kLowest);  // (1, Bh, 1)
  auto sum = ct::sum(ct::exp2(all_lse - lse_max), over_parts);           // (1, Bh, 1)
  auto acc = ct::zeros<ct::tile<float, ct::shape<1, Bh, K>>>();          // (1, Bh, K)
  for (auto p : ct::irange(0, (parts + Bp - 1) / Bp)) {
    auto lse = ct::reshape(lse_view.template load_masked<ct::view_padding::negative_inf>(token, p, head_tile),
                           ct::shape<Bp, Bh, 1>{});                                                  // (Bp, Bh, 1)
    auto part = ct::reshape(part_view.load_masked(token, p, head_tile, 0), ct::shape<Bp, Bh, K>{});  // (Bp, Bh, K)
    acc = acc + ct::sum(ct::element_cast<float>(part) * ct::exp2(lse - lse_max), over_parts);        // (1, Bh, K)
  }
  ct::partition_view sink_view{ct::tensor_span{sinks, head_extents}, ct::shape<Bh>{}};
  auto sink =
      ct::reshape(sink_view.template load_masked<ct::view_padding::negative_inf>(has_sinks ? head_tile : behind),
                  ct::shape<1, Bh, 1>{});                                   // (1, Bh, 1)
  auto divisor = divisor_of(sum, sum + ct::exp2(sink * kLog2e - lse_max));  // (1, Bh, 1)
  auto o_view = strided_view<1, Bh, K, K>(o_ptr, all_queries, heads, o_token, o_head);
  o_view.store_masked(ct::element_cast<Element>(acc * (1.0f / divisor)), token, head_tile, 0);
  auto lse = ct::select(sum == 0.0f, ct::full<Rows>(empty_lse), (lse_max + ct::log2(sum)) * lse_unit);  // (1, Bh, 1)
  const auto head = ct::iota<ct::tile<int, ct::shape<Bh>>>() + head_tile * Bh;                          // (Bh)
  const long long row =
      lse_request && request >= 0 ? request * lse_request + (token - step[request]) * lse_token : token * lse_token;
  ct::store_masked(lse_ptr + row + ct::element_cast<long long>(head) * lse_head, ct::reshape(lse, ct::shape<Bh>{}),
                   head < heads);
}

}  // namespace hypermla
