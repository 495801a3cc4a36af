// Products whose 16-bit A operand a thread makes in registers, of numbers that lie in shared memory as bytes (e4m3).
#pragma once

#include "fp8.h"
#include "wgmma.h"

namespace hypermla::cute {

// Two fp16 times two others.
__device__ __forceinline__ u32 multiply_halves(u32 x, u32 by) {
  asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(by));
  return x;
}

// The same of bfloat16.
__device__ __forceinline__ u32 multiply_bfloats(u32 x, u32 by) {
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(by));
  return x;
}

// clang-format off
#define HYPERMLA_WIDENED_NAMES_8 "{%0, %1, %2, %3, %4, %5, %6, %7}, "
#define HYPERMLA_WIDENED_NAMES_16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
#define HYPERMLA_WIDENED_LIST_8 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define HYPERMLA_WIDENED_LIST_16                                                                                   \
  HYPERMLA_WIDENED_LIST_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), \
      "+f"(d[15])
#define HYPERMLA_WIDENED_MMA(TYPE, N, COUNT, A0, A1, A2, A3, B, ACCUMULATE)                                  \
  asm volatile(                                                                                              \
      "{\n.reg .pred p;\n.reg .b64 b;\n"                                                                     \
      "setp.ne.b32 p, %" #ACCUMULATE ", 0;\n"                                                                \
      "mov.b64 b, {%" #B ", 0x40000040};\n"                                                                  \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " HYPERMLA_WIDENED_NAMES_##COUNT     \
      "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, b, p, 1, 1, 0;\n}"                                          \
      : HYPERMLA_WIDENED_LIST_##COUNT                                                                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate))
// clang-format on

// d (64 x n) += a (64 x 16) b (16 x n), as mma() of wgmma.h with a in registers, for few columns, too.
template <DType dtype, int n>
__device__ __forceinline__ void mma_few(float* d, const u32* a, u32 b, int accumulate) {
  static_assert(n == 16 || n == 32 || n == 64);
  constexpr bool bf16 = dtype == DType::bfloat16;
  if constexpr (n == 16 && bf16) HYPERMLA_WIDENED_MMA("bf16", 16, 8, 8, 9, 10, 11, 12, 13);
  if constexpr (n == 16 && !bf16) HYPERMLA_WIDENED_MMA("f16", 16, 8, 8, 9, 10, 11, 12, 13);
  if constexpr (n == 32 && bf16) HYPERMLA_WIDENED_MMA("bf16", 32, 16, 16, 17, 18, 19, 20, 21);
  if constexpr (n == 32 && !bf16) HYPERMLA_WIDENED_MMA("f16", 32, 16, 16, 17, 18, 19, 20, 21);
  if constexpr (n == 64) mma<dtype, 64>(d, a, b, accumulate);
}

#undef HYPERMLA_WIDENED_MMA
#undef HYPERMLA_WIDENED_LIST_16
#undef HYPERMLA_WIDENED_LIST_8
#undef HYPERMLA_WIDENED_NAMES_16
#undef HYPERMLA_WIDENED_NAMES_8

}  // namespace hypermla::cute
