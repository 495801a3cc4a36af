// Warpgroup matrix products of 64 rows and 64 columns whose rows (A) come from registers: for row operands that stay,
// or that the thread has just computed, beside columns that are read from shared memory once. Fragments and
// descriptors as in wgmma.h.
#pragma once

#include "wgmma.h"

namespace hypermla::cute {

#define HYPERMLA_8(d, i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define HYPERMLA_MMA_64X64_REGISTERS(TYPE)                                                        \
  asm volatile(                                                                                   \
      "{\n.reg .pred p;\n.reg .b64 b;\n"                                                          \
      "setp.ne.b32 p, %37, 0;\n"                                                                  \
      "mov.b64 b, {%36, 0x40000040};\n"                                                           \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {"                            \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "         \
      "{%32, %33, %34, %35}, b, p, 1, 1, %38;\n}"                                                 \
      : HYPERMLA_8(d, 0), HYPERMLA_8(d, 8), HYPERMLA_8(d, 16), HYPERMLA_8(d, 24)                  \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(transposed))

// d (64 x 64) += a (64 x 16, in registers) b (16 x 64). b is K-major, or transposed: MN-major, the product running
// along the rows of the box.
template <DType dtype, bool transposed>
__device__ __forceinline__ void mma_64x64(float* d, const u32* a, u32 b, int accumulate) {
  if constexpr (dtype == DType::bfloat16) {
    HYPERMLA_MMA_64X64_REGISTERS("bf16");
  } else {
    HYPERMLA_MMA_64X64_REGISTERS("f16");
  }
}

#undef HYPERMLA_MMA_64X64_REGISTERS
#undef HYPERMLA_8

}  // namespace hypermla::cute
