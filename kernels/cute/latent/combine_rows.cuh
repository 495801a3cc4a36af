// Merges the partial outputs of tiles of few rows, weighted by their log-sum-exp: combine_parts.cuh for kernels that
// hold the output transposed, N rows to a tile. A unit is 8 rows x 128 columns of a tile. What else is said there holds
// here.
#pragma once

#include "combine_parts.h"
#include "latent/merge_parts.cuh"

namespace hypermla::cute {

// o_part [slots, 4, N / 8, 128] uint4 in the order of the kernel's fragments, 16-bit elements; lse_part [slots, N]
// (log2) fp32. N = tile_rows.
template <CombinePartsProblem problem, CombinePartsTiling tiling>
__global__ void __launch_bounds__(1024) combine_rows(const __grid_constant__ CombineArguments with) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int N = with.tile_rows, thread = threadIdx.x & 127, lane = threadIdx.x & 31;
  const int row = 2 * (lane & 3);  // of the octet, in the fragment; and the one after it
  latent::for_each_unit<problem.dtype>(
      with, N / 2, reinterpret_cast<latent::Merged*>(shared),
      [&](const CombineItem& item, int unit, bool writes, auto merge) {  // 8 rows x twice 64 columns
        const int pair = unit % 4, octet = unit / 4;
        const uint4* parts =
            static_cast<const uint4*>(with.o_part) + (item.first_slot * 4LL + pair) * (N * 16) + octet * 128 + thread;
        const float* lse_parts = with.lse_part + item.first_slot * static_cast<long long>(N) + octet * 8 + row;
        const latent::Merged all = merge(
            [&](int first, int i, bool wanted) { return latent::load_at_once(parts + (first + i) * (N * 64), wanted); },
            [&](int first, int i, bool wanted) {
              const float* of = lse_parts + (first + i) * N;
              return float2{latent::load_at_once(of, wanted), latent::load_at_once(of + 1, wanted)};
            });
        if (!writes) return;
        const int first_row = item.row_tile * N + octet * 8, rows = item.queries * with.heads;
        if (pair == 0 && thread < 4) {
          const float2 log_sum = all.lse(with.lse_unit, with.empty_lse);
          auto write = [&](int at, float log) {
            if (at < rows) with.lse[with.lse_rows.offset(item.request, item.first_row, at)] = log;
          };
          write(first_row + row, log_sum.x);
          write(first_row + row + 1, log_sum.y);
        }
        unsigned short* out = static_cast<unsigned short*>(with.o) +
                              with.o_rows.offset(item.request, item.first_row, first_row + lane / 4);
        const u32 words[4] = {
            pack<problem.dtype>(all.first.x, all.second.x), pack<problem.dtype>(all.first.y, all.second.y),
            pack<problem.dtype>(all.first.z, all.second.z), pack<problem.dtype>(all.first.w, all.second.w)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 word = transpose_fragment(words[i]);  // the lane's row is lane / 4, its columns are row and row + 1
          if (first_row + lane / 4 < rows) {
            const int column = (2 * pair + i / 2) * 64 + thread / 32 * 16 + i % 2 * 8 + row;
            *reinterpret_cast<u32*>(out + column) = word;
          }
        }
      });
}

}  // namespace hypermla::cute
