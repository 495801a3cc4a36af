// Warpgroup matrix products: thin wrappers over wgmma for 16-bit operands and fp32 accumulators.
//
// D (64 x N) += A (64 x 16) B (16 x N), asynchronous: open a stage with mma_fence(), issue products, close it with
// mma_commit(), and touch no accumulator of the stage before mma_wait<stages still allowed in flight>().
// Thread t of the warpgroup holds rows r = 16 * (t / 32) + t % 32 / 4 and r + 8 of D: elements d[4i], d[4i + 1] are
// (r, 8i + 2 * (t % 4)) and the column after it, d[4i + 2], d[4i + 3] the same columns of row r + 8.
// Shared-memory operands are boxes of 64 rows x 64 columns with the 128-byte swizzle (8192 bytes, see tma.h), named by
// the low half of the matrix descriptor; the high half is the same for all of them. A 64-bit sum per product instead of
// this 32-bit one costs about 49 issue cycles.
#pragma once

#include "hypermla/dtype.h"
#include "mbarrier.h"

namespace hypermla::cute {

inline constexpr u32 kBoxBytes = 64 * 64 * 2;

// K-major operand: rows of the box are rows of A or columns of B, the product runs along the box's columns. The next 16
// of them are 32 bytes on (+ 2 in descriptor units).
__device__ __forceinline__ u32 operand_k_major(u32 shared) { return (shared & 0x3ffff) >> 4 | 1u << 16; }

// MN-major B: the product runs along the rows of the box (the next 16 are 2048 bytes on, + 128), the columns of B go on
// in the next box. A box may have more rows than 64.
__device__ __forceinline__ u32 operand_mn_major(u32 shared, u32 box_bytes = kBoxBytes) {
  return (shared & 0x3ffff) >> 4 | box_bytes >> 4 << 16;
}

inline constexpr u32 kNextBox = kBoxBytes >> 4;  // in descriptor units

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

#define HYPERMLA_8(d, i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define HYPERMLA_32(d, i) HYPERMLA_8(d, i), HYPERMLA_8(d, i + 8), HYPERMLA_8(d, i + 16), HYPERMLA_8(d, i + 24)
#define HYPERMLA_MMA_64X64(TYPE) \
  asm volatile( \
      "{\n.reg .pred p;\n.reg .b64 a, b;\n" \
      "setp.ne.b32 p, %34, 0;\n" \
      "mov.b64 a, {%32, 0x40000040};\n" \
      "mov.b64 b, {%33, 0x40000040};\n" \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15," \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
      "a, b, p, 1, 1, 0, 0;\n}" \
      : HYPERMLA_32(d, 0) \
      : "r"(a), "r"(b), "r"(accumulate))
#define HYPERMLA_MMA_64X128(TYPE) \
  asm volatile( \
      "{\n.reg .pred p;\n.reg .b64 a, b;\n" \
      "setp.ne.b32 p, %66, 0;\n" \
      "mov.b64 a, {%64, 0x40000040};\n" \
      "mov.b64 b, {%65, 0x40000040};\n" \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15," \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31," \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47," \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
      "a, b, p, 1, 1, 0, 1;\n}" \
      : HYPERMLA_32(d, 0), HYPERMLA_32(d, 32) \
      : "r"(a), "r"(b), "r"(accumulate))
#define HYPERMLA_MMA_64X128_REGISTERS(TYPE) \
  asm volatile( \
      "{\n.reg .pred p;\n.reg .b64 a, b;\n" \
      "setp.ne.b32 p, %69, 0;\n" \
      "mov.b64 b, {%68, 0x40000040};\n" \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15," \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31," \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47," \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
      "{%64, %65, %66, %67}, b, p, 1, 1, 1;\n}" \
      : HYPERMLA_32(d, 0), HYPERMLA_32(d, 32) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate))
#define HYPERMLA_MMA_64X128_REGISTERS_K_MAJOR(TYPE) \
  asm volatile( \
      "{\n.reg .pred p;\n.reg .b64 a, b;\n" \
      "setp.ne.b32 p, %69, 0;\n" \
      "mov.b64 b, {%68, 0x40000040};\n" \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15," \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31," \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47," \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
      "{%64, %65, %66, %67}, b, p, 1, 1, 0;\n}" \
      : HYPERMLA_32(d, 0), HYPERMLA_32(d, 32) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate))

// d (64 x 64) += a (64 x 16, K-major) b (16 x 64, K-major).
template <DType dtype>
__device__ __forceinline__ void mma_64x64(float* d, u32 a, u32 b, int accumulate) {
  if constexpr (dtype == DType::bfloat16) {
    HYPERMLA_MMA_64X64("bf16");
  } else {
    HYPERMLA_MMA_64X64("f16");
  }
}

// d (64 x 128) += a (64 x 16, K-major) b (16 x 128, MN-major).
template <DType dtype>
__device__ __forceinline__ void mma_64x128(float* d, u32 a, u32 b, int accumulate) {
  if constexpr (dtype == DType::bfloat16) {
    HYPERMLA_MMA_64X128("bf16");
  } else {
    HYPERMLA_MMA_64X128("f16");
  }
}

// The same with a (64 x 16) in registers: a[0] row r, a[1] row r + 8 of columns 0..7, a[2] and a[3] of 8..15.
template <DType dtype>
__device__ __forceinline__ void mma_64x128(float* d, const u32* a, u32 b, int accumulate) {
  if constexpr (dtype == DType::bfloat16) {
    HYPERMLA_MMA_64X128_REGISTERS("bf16");
  } else {
    HYPERMLA_MMA_64X128_REGISTERS("f16");
  }
}

// d (64 x 128) += a (64 x 16, in registers) b (16 x 128, K-major: a box of 128 rows).
template <DType dtype>
__device__ __forceinline__ void mma_64x128_k_major(float* d, const u32* a, u32 b, int accumulate) {
  if constexpr (dtype == DType::bfloat16) {
    HYPERMLA_MMA_64X128_REGISTERS_K_MAJOR("bf16");
  } else {
    HYPERMLA_MMA_64X128_REGISTERS_K_MAJOR("f16");
  }
}

// A's registers for 16 rows of this warp and 16 columns, from a box with the 128-byte swizzle: lane l gives the address of
// row l % 16, columns 8 * (l / 16) and on.
__device__ __forceinline__ void load_matrices(u32* a, u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared)
               : "memory");
}

#undef HYPERMLA_MMA_64X64
#undef HYPERMLA_MMA_64X128
#undef HYPERMLA_MMA_64X128_REGISTERS
#undef HYPERMLA_MMA_64X128_REGISTERS_K_MAJOR
#undef HYPERMLA_32
#undef HYPERMLA_8

// Two fp32 to one register of two 16-bit elements, the first in the low half.
template <DType dtype>
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 packed;
  if constexpr (dtype == DType::bfloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}
template <DType dtype>
__device__ __forceinline__ float2 unpack(u32 packed) {
  float2 x;
  if constexpr (dtype == DType::bfloat16) {
    x = {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000)};
  } else {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(x.x), "=f"(x.y)
        : "r"(packed));
  }
  return x;
}

}  // namespace hypermla::cute
