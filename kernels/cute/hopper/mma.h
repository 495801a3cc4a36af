// Matrix products of one warp: mma.sync over 16-bit operands in registers, fp32 sums. They take what a lane has just
// made, and are over where their result is used. On Hopper they reach about 0.6 of what wgmma does.
#pragma once

#include "fragments.h"

namespace hypermla::cute {

// d (16 x 8) += a (16 x 16) b (16 x 8). Lane t holds rows t / 4 (d[0], d[1], a[0], a[2]) and t / 4 + 8 (d[2], d[3],
// a[1], a[3]): of d columns 2 (t % 4) and the one after it, of a those, too, and 8 further on a[2] and a[3]. b0 and b1
// are rows 2 (t % 4) and the one after it, and 8 further on, of column t / 4.
template <DType dtype>
__device__ __forceinline__ void mma_warp(float* d, const u32* a, u32 b0, u32 b1) {
  if constexpr (dtype == DType::bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace hypermla::cute
