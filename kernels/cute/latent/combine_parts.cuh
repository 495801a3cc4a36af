// Merges the partial outputs of the tiles that the latent kernel cut over several work items, weighted by their
// log-sum-exp.
//
// grid = any, 128 to 1024 threads; what for_each_unit() says. A unit is 64 rows x 16 columns of a tile. Dynamic shared
// memory: combine_shared_bytes(). Every thread computes the weights of its own rows: sharing them would need two more
// waits.
// Launched programmatically: it waits for the kernel before it, but reads its list earlier. The kernel that made the
// list had ended when the kernel before let this one start.
#pragma once

#include "combine_parts.h"
#include "latent/merge_parts.cuh"

namespace hypermla::cute {

// o_part [slots, 16, 2, 128] uint4 in the order of the latent kernel's fragments, 16-bit elements; lse_part [slots, 64]
// (log2) fp32.
template <CombinePartsProblem problem, CombinePartsTiling tiling>
__global__ void __launch_bounds__(1024) combine_parts(const __grid_constant__ CombineArguments with) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread = threadIdx.x & 127,
            row = thread / 32 * 16 + thread % 32 / 4;  // of the tile; and the one 8 after it
  latent::for_each_unit<problem.dtype>(
      with, 32, reinterpret_cast<latent::Merged*>(shared),
      [&](const CombineItem& item, int unit, bool writes, auto merge) {  // 16 columns, of the left or the right half
        const uint4* parts = static_cast<const uint4*>(with.o_part) + (item.first_slot * 32LL + unit) * 128 + thread;
        const float* lse_parts = with.lse_part + item.first_slot * 64LL + row;
        const latent::Merged all =
            merge([&](int first, int i,
                      bool wanted) { return latent::load_at_once(parts + first * 4096 + i * 4096, wanted); },
                  [&](int first, int i, bool wanted) {
                    const float* of = lse_parts + first * 64 + i * 64;
                    return float2{latent::load_at_once(of, wanted), latent::load_at_once(of + 8, wanted)};
                  });
        if (!writes) return;
        const int in_request = item.row_tile * 64 + row, rows = item.queries * with.heads;
        const float2 log_sum = all.lse(with.lse_unit, with.empty_lse);
        auto write = [&](int at, float4 x, float log) {
          if (at >= rows) return;
          if (unit == 0 && (thread & 3) == 0) with.lse[with.lse_rows.offset(item.request, item.first_row, at)] = log;
          u32* out = reinterpret_cast<u32*>(static_cast<unsigned short*>(with.o) +
                                            with.o_rows.offset(item.request, item.first_row, at) + unit % 2 * 256 +
                                            unit / 2 * 16 + 2 * (thread & 3));
          out[0] = pack<problem.dtype>(x.x, x.y);
          out[4] = pack<problem.dtype>(x.z, x.w);
        };
        write(in_request, all.first, log_sum.x);
        write(in_request + 8, all.second, log_sum.y);
      });
}

}  // namespace hypermla::cute
