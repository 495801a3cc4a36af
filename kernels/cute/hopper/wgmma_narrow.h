// Warpgroup matrix products with few columns, for operands that wgmma.h leaves out: where a problem has few rows, they
// make the columns of the product ("swap AB"), and what is long makes its 64 rows. Fragments and descriptors as in
// wgmma.h; results come out transposed, so here are the transposing stores as well.
//
// Shared memory bounds these products: a 64 x 16 operand takes 16 cycles to read, as long as n = 32 takes to multiply.
#pragma once

#include "wgmma.h"

namespace hypermla::cute {

#define HYPERMLA_8(d, i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define HYPERMLA_MMA_64X16(TYPE)                                          \
  asm volatile(                                                           \
      "{\n.reg .pred p;\n.reg .b64 a, b;\n"                               \
      "setp.ne.b32 p, %10, 0;\n"                                          \
      "mov.b64 a, {%8, 0x40000040};\n"                                    \
      "mov.b64 b, {%9, 0x40000040};\n"                                    \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE " {"    \
      "%0, %1, %2, %3, %4, %5, %6, %7}, a, b, p, 1, 1, %11, 0;\n}"        \
      : HYPERMLA_8(d, 0)                                                  \
      : "r"(a), "r"(b), "r"(accumulate), "n"(transposed))
#define HYPERMLA_MMA_64X32(TYPE)                                                          \
  asm volatile(                                                                           \
      "{\n.reg .pred p;\n.reg .b64 a, b;\n"                                               \
      "setp.ne.b32 p, %18, 0;\n"                                                          \
      "mov.b64 a, {%16, 0x40000040};\n"                                                   \
      "mov.b64 b, {%17, 0x40000040};\n"                                                   \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {"                    \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "           \
      "a, b, p, 1, 1, %19, 0;\n}"                                                         \
      : HYPERMLA_8(d, 0), HYPERMLA_8(d, 8)                                                \
      : "r"(a), "r"(b), "r"(accumulate), "n"(transposed))

// d (64 x n) += a (64 x 16) b (16 x n, K-major), n = 16 or 32. a is K-major, or transposed: MN-major, the product
// running along the rows of the box, the rows of a along its 64 columns.
template <DType dtype, int n, bool transposed>
__device__ __forceinline__ void mma_64xn(float* d, u32 a, u32 b, int accumulate) {
  static_assert(n == 16 || n == 32);
  if constexpr (n == 16 && dtype == DType::bfloat16) {
    HYPERMLA_MMA_64X16("bf16");
  } else if constexpr (n == 16) {
    HYPERMLA_MMA_64X16("f16");
  } else if constexpr (dtype == DType::bfloat16) {
    HYPERMLA_MMA_64X32("bf16");
  } else {
    HYPERMLA_MMA_64X32("f16");
  }
}

#undef HYPERMLA_MMA_64X16
#undef HYPERMLA_MMA_64X32
#undef HYPERMLA_8

// Four 8x8 matrices of 16-bit elements, each stored as its transpose; lane l gives the address of row l % 8 of the
// stored matrix l / 8.
__device__ __forceinline__ void store_transposed(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// The fragment of the transpose of an 8x8 matrix of 16-bit elements.
__device__ __forceinline__ u32 transpose_fragment(u32 a) {
  u32 b;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b) : "r"(a));
  return b;
}

}  // namespace hypermla::cute
