// Merges the parts that attend_pages.cuh leaves of every query and head, by their log-sum-exp. Outputs of queries
// that belong to no request are not written.
//
// grid = (all_queries, ceil(heads / Bh), 512 / Bv)
#pragma once

#include "cutile/weighted_rows.cuh"
#include "decode.h"

namespace hypermla {

// o_part [parts, all_queries, heads, 512], lse_part [parts, all_queries, heads] in units of log2, step and request_of
// as plan_step() leaves them, sinks [heads] or nothing -> o and lse by their strides. lse_unit: what one unit of log2
// is; empty_lse: of a query that sees no token.
template <DType dtype, int Bh, int Bv>
[[using cutile: hint(0, num_worker_warps_per_cta = 4)]] __tile_global__ void merge_parts(
    const element_t<dtype>* __restrict__ o_part, const float* __restrict__ lse_part, const int* __restrict__ step,
    const int* __restrict__ request_of, const float* __restrict__ sinks, element_t<dtype>* __restrict__ o_ptr,
    float* __restrict__ lse_ptr, int has_sinks, int heads, int all_queries, int parts, float lse_unit, float empty_lse,
    long long o_token, long long o_head, long long lse_token, long long lse_head, long long lse_request) {
  using Element = element_t<dtype>;
  using Rows = ct::tile<float, ct::shape<Bh, 1>>;
  constexpr int K = kDecodeLatent;
  constexpr auto dyn = ct::dynamic_extent;

  const int token = ct::bid().x, columns = ct::bid().z, behind = (heads + Bh - 1) / Bh;
  const int request = request_of[token];
  const int head_tile = request < 0 ? behind : int(ct::bid().y);  // see attend_pages.cuh
  ct::extents<unsigned, dyn, K> part_extents{unsigned(heads)};
  ct::extents<unsigned, dyn> head_extents{unsigned(heads)};
  // By value: what a reference needs the address of is taken from the heap of the GPU (malloc), 30 us for each part.
  auto lse_of = [=](int part) {
    const long long row = (long long)(part)*all_queries + token;
    ct::partition_view view{ct::tensor_span{lse_part + row * heads, head_extents}, ct::shape<Bh>{}};
    return ct::reshape(view.load_masked(head_tile), ct::shape<Bh, 1>{});  // (Bh, 1)
  };

  MergedParts<Bh, Bv, false> merged;
  for (auto part : ct::irange(0, parts)) merged.see(lse_of(part));
  for (auto part : ct::irange(0, parts)) {
    const long long row = (long long)(part)*all_queries + token;
    ct::partition_view view{ct::tensor_span{ct::assume_aligned<16>(o_part + row * heads * K), part_extents},
                            ct::shape<Bh, Bv>{}};
    auto weight = merged.weight(lse_of(part));                                                         // (Bh, 1)
    merged.acc = merged.acc + ct::element_cast<float>(view.load_masked(head_tile, columns)) * weight;  // (Bh, Bv)
  }
  ct::partition_view sink_view{ct::tensor_span{sinks, head_extents}, ct::shape<Bh>{}};
  auto sink =
      ct::reshape(sink_view.template load_masked<ct::view_padding::negative_inf>(has_sinks ? head_tile : behind),
                  ct::shape<Bh, 1>{});                               // (Bh, 1)
  auto all = merged.sum + ct::exp2(sink * kLog2e - merged.lse_max);  // (Bh, 1)
  auto divisor = divisor_of(merged.sum, all);                        // (Bh, 1)
  ct::extents<unsigned, dyn, dyn> o_extents{unsigned(heads), ct::assume_divisible<8>(unsigned(o_head))};
  ct::partition_view o_view{ct::tensor_span{ct::assume_aligned<16>(o_ptr + token * o_token), o_extents},
                            ct::shape<Bh, Bv>{}};
  o_view.store_masked(ct::element_cast<Element>(merged.acc * (1.0f / divisor)), head_tile, columns);
  if (columns == 0) {
    auto lse = ct::select(merged.sum == 0.0f, ct::full<Rows>(empty_lse), merged.lse() * lse_unit);  // (Bh, 1)
    const auto head = ct::iota<ct::tile<int, ct::shape<Bh>>>() + head_tile * Bh;                    // (Bh)
    const long long row =
        lse_request && request >= 0 ? request * lse_request + (token - step[request]) * lse_token : token * lse_token;
    ct::store_masked(lse_ptr + row + ct::element_cast<long long>(head) * lse_head, ct::reshape(lse, ct::shape<Bh>{}),
                     head < heads);
  }
}

}  // namespace hypermla
