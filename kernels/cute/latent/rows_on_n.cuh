// How partial outputs are written where rows are on the N side.
#pragma once

#include "latent/merge_tiles.cuh"

namespace hypermla::cute::latent {

// Half of the columns of a part with rows on N, times scale(i) of two rows of octet i: [slot][half][two of its four
// fragments][octet of rows][thread of a warpgroup]. Every access is whole lines.
template <int N, class Scale>
__device__ __forceinline__ void store_part(const LatentArguments& with, int slot, int half, const float (*o)[N / 2],
                                           Scale scale) {
  constexpr DType of = DType::float16;
  constexpr int kOctets = N / 8;
  uint4* const out = static_cast<uint4*>(with.o_part) + (slot * 4LL + half * 2) * (kOctets * 128) + (thread_id() & 127);
#pragma unroll
  for (int i = 0; i < 2 * kOctets; ++i) {
    const float *x = o[i / kOctets * 2] + i % kOctets * 4, *y = o[i / kOctets * 2 + 1] + i % kOctets * 4;
    const float2 by = scale(i % kOctets);
    store_to_stay(out + i * 128, make_uint4(pack<of>(x[0] * by.x, x[2] * by.x), pack<of>(x[1] * by.y, x[3] * by.y),
                                            pack<of>(y[0] * by.x, y[2] * by.x), pack<of>(y[1] * by.y, y[3] * by.y)));
  }
}

}  // namespace hypermla::cute::latent
