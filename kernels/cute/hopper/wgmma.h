// Warpgroup matrix products: thin wrappers over wgmma for 16-bit operands and fp32 accumulators.
//
// D (64 x N) += A (64 x 16) B (16 x N), asynchronous: open a group with mma_fence(), issue products, close it with
// mma_commit(), and touch no accumulator of the group before mma_wait<groups that may still be in flight>().
// Thread t of the warpgroup holds rows r = 16 * (t / 32) + t % 32 / 4 and r + 8 of D: elements d[4i], d[4i + 1] are
// (r, 8i + 2 * (t % 4)) and the column after it, d[4i + 2], d[4i + 3] the same columns of row r + 8.
// Operands in shared memory are boxes of 64 rows x 64 columns with the 128-byte swizzle (8192 bytes, see tma.h), named
// by the low half of the matrix descriptor; the high half is the same for all of them. A 64-bit sum per product instead
// of this 32-bit one costs about 49 issue cycles.
//
// Where a problem has few rows, they are the columns of the product (N = 16 or 32), and what is long is its 64 rows
// ("swap AB"). Shared memory bounds those: a 64 x 16 operand takes 16 cycles to read, as long as N = 32 takes to
// multiply.
#pragma once

#include "hypermla/dtype.h"
#include "mbarrier.h"

namespace hypermla::cute {

inline constexpr u32 kBoxBytes = 64 * 64 * 2;

// How an operand lies in shared memory. k: the product runs along the columns of the box, whose rows are rows of A or
// columns of B. mn: the product runs along the rows of the box, and rows of A or columns of B go on in the next box.
enum class Major { k, mn };

// Descriptors, in units of 16 bytes: the next 16 of the product's dimension are 2 further on (k), or 128 (mn).
__device__ __forceinline__ u32 operand_k_major(u32 shared) { return (shared & 0x3ffff) >> 4 | 1u << 16; }
// A box may have more rows than 64.
__device__ __forceinline__ u32 operand_mn_major(u32 shared, u32 box_bytes = kBoxBytes) {
  return (shared & 0x3ffff) >> 4 | box_bytes >> 4 << 16;
}

inline constexpr u32 kNextBox = kBoxBytes >> 4;  // of a descriptor

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving uses of accumulators across this point.
template <int n>
__device__ __forceinline__ void pin(float* d) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The lists of d's registers, and their names in the instruction.
// clang-format off
#define HYPERMLA_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define HYPERMLA_NAMES_16 HYPERMLA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define HYPERMLA_NAMES_32 \
  HYPERMLA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HYPERMLA_NAMES_64                                                                              \
  HYPERMLA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
                    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HYPERMLA_LIST_8(i)                                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define HYPERMLA_LIST_16(i) HYPERMLA_LIST_8(i), HYPERMLA_LIST_8(i + 8)
#define HYPERMLA_LIST_32(i) HYPERMLA_LIST_16(i), HYPERMLA_LIST_16(i + 16)
#define HYPERMLA_LIST_64(i) HYPERMLA_LIST_32(i), HYPERMLA_LIST_32(i + 32)

// `count` registers of d; A, B and so on: the numbers of the operands behind them.
#define HYPERMLA_MMA_SHARED(TYPE, N, COUNT, A, B, ACCUMULATE, MAJOR_A, MAJOR_B)                        \
  asm volatile(                                                                                        \
      "{\n.reg .pred p;\n.reg .b64 a, b;\n"                                                            \
      "setp.ne.b32 p, %" #ACCUMULATE ", 0;\n"                                                          \
      "mov.b64 a, {%" #A ", 0x40000040};\n"                                                            \
      "mov.b64 b, {%" #B ", 0x40000040};\n"                                                            \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" HYPERMLA_NAMES_##COUNT "}, " \
      "a, b, p, 1, 1, %" #MAJOR_A ", %" #MAJOR_B ";\n}"                                                \
      : HYPERMLA_LIST_##COUNT(0)                                                                       \
      : "r"(a), "r"(b), "r"(accumulate), "n"(major_a == Major::mn), "n"(major_b == Major::mn))
#define HYPERMLA_MMA_REGISTERS(TYPE, N, COUNT, A0, A1, A2, A3, B, ACCUMULATE, MAJOR_B)                 \
  asm volatile(                                                                                        \
      "{\n.reg .pred p;\n.reg .b64 b;\n"                                                               \
      "setp.ne.b32 p, %" #ACCUMULATE ", 0;\n"                                                          \
      "mov.b64 b, {%" #B ", 0x40000040};\n"                                                            \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" HYPERMLA_NAMES_##COUNT "}, " \
      "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, b, p, 1, 1, %" #MAJOR_B ";\n}"                        \
      : HYPERMLA_LIST_##COUNT(0)                                                                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(major_b == Major::mn))
// clang-format on

// d (64 x n) += a (64 x 16) b (16 x n), both in shared memory; accumulate == 0: d = a b.
template <DType dtype, int n, Major major_b = Major::k, Major major_a = Major::k>
__device__ __forceinline__ void mma(float* d, u32 a, u32 b, int accumulate) {
  static_assert(n == 16 || n == 32 || n == 64 || n == 128);
  constexpr bool bf16 = dtype == DType::bfloat16;
  if constexpr (n == 16 && bf16) HYPERMLA_MMA_SHARED("bf16", 16, 8, 8, 9, 10, 11, 12);
  if constexpr (n == 16 && !bf16) HYPERMLA_MMA_SHARED("f16", 16, 8, 8, 9, 10, 11, 12);
  if constexpr (n == 32 && bf16) HYPERMLA_MMA_SHARED("bf16", 32, 16, 16, 17, 18, 19, 20);
  if constexpr (n == 32 && !bf16) HYPERMLA_MMA_SHARED("f16", 32, 16, 16, 17, 18, 19, 20);
  if constexpr (n == 64 && bf16) HYPERMLA_MMA_SHARED("bf16", 64, 32, 32, 33, 34, 35, 36);
  if constexpr (n == 64 && !bf16) HYPERMLA_MMA_SHARED("f16", 64, 32, 32, 33, 34, 35, 36);
  if constexpr (n == 128 && bf16) HYPERMLA_MMA_SHARED("bf16", 128, 64, 64, 65, 66, 67, 68);
  if constexpr (n == 128 && !bf16) HYPERMLA_MMA_SHARED("f16", 128, 64, 64, 65, 66, 67, 68);
}

// The same with a (64 x 16) in registers: a[0] row r, a[1] row r + 8 of columns 0..7, a[2] and a[3] of 8..15.
template <DType dtype, int n, Major major_b = Major::k>
__device__ __forceinline__ void mma(float* d, const u32* a, u32 b, int accumulate) {
  static_assert(n == 64 || n == 128);
  constexpr bool bf16 = dtype == DType::bfloat16;
  if constexpr (n == 64 && bf16) HYPERMLA_MMA_REGISTERS("bf16", 64, 32, 32, 33, 34, 35, 36, 37, 38);
  if constexpr (n == 64 && !bf16) HYPERMLA_MMA_REGISTERS("f16", 64, 32, 32, 33, 34, 35, 36, 37, 38);
  if constexpr (n == 128 && bf16) HYPERMLA_MMA_REGISTERS("bf16", 128, 64, 64, 65, 66, 67, 68, 69, 70);
  if constexpr (n == 128 && !bf16) HYPERMLA_MMA_REGISTERS("f16", 128, 64, 64, 65, 66, 67, 68, 69, 70);
}

#undef HYPERMLA_MMA_SHARED
#undef HYPERMLA_MMA_REGISTERS
#undef HYPERMLA_NAMES_8
#undef HYPERMLA_NAMES_16
#undef HYPERMLA_NAMES_32
#undef HYPERMLA_NAMES_64
#undef HYPERMLA_LIST_8
#undef HYPERMLA_LIST_16
#undef HYPERMLA_LIST_32
#undef HYPERMLA_LIST_64

}  // namespace hypermla::cute
