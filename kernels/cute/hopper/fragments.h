// Fragments: the pieces of a matrix that the lanes of a warp hold for wgmma, and their way to and from shared memory.
//
// A fragment of 8 x 8 16-bit elements is one register: lane t holds columns 2 * (t % 4) and the one after it of row t /
// 4. In shared memory a box has lines of 64 columns (128 bytes) with the 128-byte swizzle, see tma.h.
#pragma once

#include "hypermla/dtype.h"
#include "mbarrier.h"

namespace hypermla::cute {

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

// Bytes from the start of a box to 8 columns of a line: `unit` 0 is columns 0..7.
__device__ __forceinline__ u32 swizzled(u32 line, u32 unit) { return line * 128 + ((unit ^ line % 8) << 4); }

// Four fragments from shared memory; lane l gives the address of row l % 8 of fragment l / 8. From a box, with the
// address of line l % 16 and unit l / 16 + 2 i, that is 16 rows and 16 columns of an A operand.
__device__ __forceinline__ void load_matrices(u32* a, u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared)
               : "memory");
}

// Four fragments to shared memory; lane l gives the address of row l % 8 of fragment l / 8.
__device__ __forceinline__ void store_matrices(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// The same, each fragment as its transpose: the lane's address is that of a row of the transposed fragment.
__device__ __forceinline__ void store_transposed(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// The fragment of the transpose.
__device__ __forceinline__ u32 transpose_fragment(u32 a) {
  u32 b;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b) : "r"(a));
  return b;
}

__device__ __forceinline__ uint4 load_shared(u32 shared) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_zeros(u32 shared) {  // 16 bytes
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
}

}  // namespace hypermla::cute
