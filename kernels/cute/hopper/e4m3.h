// Products of numbers of e4m3 (8 bits: 4 of exponent, 3 of mantissa): wgmma over 32 of them at a time, fp32 sums.
//
// Both operands run along their lines ("K-major"), as no other order of bytes is offered. Operands in shared memory are
// boxes of lines of 128 bytes with the 128-byte swizzle (tma.h), or of 64 bytes with the 64-byte swizzle: there line r,
// byte c lies at r * 64 + ((c / 16) ^ (r / 2 % 4)) * 16 + c % 16. They are named by operand_k_major(); the next 32
// bytes of a line are 2 further on. Accumulators are those of wgmma.h.
//
// The tensor core aligns the 32 products and the sum before them to the largest of these, keeps 13 bits of each behind
// that one's point, and cuts the rest off: 2^14 and 32 ones are 2^14 (docs/log/cute-flash-mla-v2.md; DeepSeek-V3,
// arXiv 2412.19437, section 3.3.2, finds about 14 bits). So every product loses up to 2^-13 of the sum so far: 4096
// equal ones are 6 % short, and long sums belong into registers.
#pragma once

#include "fragments.h"
#include "wgmma.h"

namespace hypermla::cute {

// How long the lines of an operand are.
enum class Line { bytes_128, bytes_64 };

// Bytes from the start of a box of lines of 64 bytes to 16 of them.
__device__ __forceinline__ u32 swizzled_64(u32 line, u32 unit) { return line * 64 + ((unit ^ (line / 2 % 4)) << 4); }

// Four numbers, the first in the lowest byte; rounded to nearest, beyond 448 to 448.
__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
  u32 packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// The sum of 8 numbers that are not negative, in fp16: to 11 bits.
__device__ __forceinline__ float sum_of_e4m3(const u32 (&words)[2]) {
  u32 sum = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm("{\n.reg .b16 low, high;\n.reg .b32 x, y;\nmov.b32 {low, high}, %1;\n"
        "cvt.rn.f16x2.e4m3x2 x, low;\ncvt.rn.f16x2.e4m3x2 y, high;\n"
        "add.rn.f16x2 x, x, y;\nadd.rn.f16x2 %0, %0, x;\n}"
        : "+r"(sum)
        : "r"(words[i]));
  }
  const float2 both = unpack<DType::float16>(sum);
  return both.x + both.y;
}

// Four fragments from shared memory, each as its transpose; lane l gives the address of row l % 8 of fragment l / 8 as
// it lies there. Of lane l, a[i] holds rows 2 (l % 4) and the one after it of columns l / 4, in 16 bits each.
__device__ __forceinline__ void load_transposed(u32 (&a)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared)
               : "memory");
}

// clang-format off
#define HYPERMLA_E4M3_NAMES_8 "{%0, %1, %2, %3, %4, %5, %6, %7}, "
#define HYPERMLA_E4M3_NAMES_16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
#define HYPERMLA_E4M3_NAMES_24                                                                           \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23}, "
#define HYPERMLA_E4M3_NAMES_32                                                                           \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define HYPERMLA_E4M3_LIST(i)                                                                                 \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define HYPERMLA_E4M3_LIST_8 HYPERMLA_E4M3_LIST(0)
#define HYPERMLA_E4M3_LIST_16 HYPERMLA_E4M3_LIST_8, HYPERMLA_E4M3_LIST(8)
#define HYPERMLA_E4M3_LIST_24 HYPERMLA_E4M3_LIST_16, HYPERMLA_E4M3_LIST(16)
#define HYPERMLA_E4M3_LIST_32 HYPERMLA_E4M3_LIST_24, HYPERMLA_E4M3_LIST(24)
#define HYPERMLA_E4M3_SHARED(HIGH)                                                                        \
  asm volatile(                                                                                           \
      "{\n.reg .pred p;\n.reg .b64 a, b;\n"                                                               \
      "setp.ne.b32 p, %34, 0;\n"                                                                          \
      "mov.b64 a, {%32, " HIGH "};\n"                                                                     \
      "mov.b64 b, {%33, " HIGH "};\n"                                                                     \
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " HYPERMLA_E4M3_NAMES_32 "a, b, p, 1, 1;\n}"  \
      : HYPERMLA_E4M3_LIST_32                                                                             \
      : "r"(a), "r"(b), "r"(accumulate))
#define HYPERMLA_E4M3_REGISTERS(N, COUNT, A0, A1, A2, A3, B, ACCUMULATE)                                  \
  asm volatile(                                                                                           \
      "{\n.reg .b64 b;\n"                                                                                 \
      "mov.b64 b, {%" #B ", 0x80000020};\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 " HYPERMLA_E4M3_NAMES_##COUNT             \
      "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, b, " #ACCUMULATE ", 1, 1;\n}"                            \
      : HYPERMLA_E4M3_LIST_##COUNT                                                                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
#define HYPERMLA_E4M3_OF_ROWS(ACCUMULATE)                                                 \
  if constexpr (n == 16) HYPERMLA_E4M3_REGISTERS(16, 8, 8, 9, 10, 11, 12, ACCUMULATE);    \
  if constexpr (n == 32) HYPERMLA_E4M3_REGISTERS(32, 16, 16, 17, 18, 19, 20, ACCUMULATE); \
  if constexpr (n == 48) HYPERMLA_E4M3_REGISTERS(48, 24, 24, 25, 26, 27, 28, ACCUMULATE); \
  if constexpr (n == 64) HYPERMLA_E4M3_REGISTERS(64, 32, 32, 33, 34, 35, 36, ACCUMULATE)
// clang-format on

// d (64 x 64) += a (64 x 32) b (32 x 64), both in shared memory; accumulate == 0: d = a b.
template <Line line>
__device__ __forceinline__ void mma_e4m3(float* d, u32 a, u32 b, int accumulate) {
  if constexpr (line == Line::bytes_128) HYPERMLA_E4M3_SHARED("0x40000040");
  if constexpr (line == Line::bytes_64) HYPERMLA_E4M3_SHARED("0x80000020");
}

// d (64 x n) += a (64 x 32) b (32 x n), a in registers and b of lines of 64 bytes; !accumulate: d = a b. Thread t has
// rows r and r + 8 (wgmma.h): a[0] and a[1] their columns 4 (t % 4) to 4 (t % 4) + 3, a[2] and a[3] those 16 further.
template <int n, bool accumulate>
__device__ __forceinline__ void mma_e4m3(float* d, const u32* a, u32 b) {
  static_assert(n == 16 || n == 32 || n == 48 || n == 64);
  if constexpr (accumulate) {
    HYPERMLA_E4M3_OF_ROWS(1);
  } else {
    HYPERMLA_E4M3_OF_ROWS(0);
  }
}

#undef HYPERMLA_E4M3_OF_ROWS
#undef HYPERMLA_E4M3_REGISTERS
#undef HYPERMLA_E4M3_SHARED
#undef HYPERMLA_E4M3_LIST_32
#undef HYPERMLA_E4M3_LIST_24
#undef HYPERMLA_E4M3_LIST_16
#undef HYPERMLA_E4M3_LIST_8
#undef HYPERMLA_E4M3_LIST
#undef HYPERMLA_E4M3_NAMES_32
#undef HYPERMLA_E4M3_NAMES_24
#undef HYPERMLA_E4M3_NAMES_16
#undef HYPERMLA_E4M3_NAMES_8

}  // namespace hypermla::cute
