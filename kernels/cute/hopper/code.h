// The machine code of the running kernel, as memory that can be asked for.
//
// PTX has no name for where code lies: a pointer to a function is an index, and there is no program counter. The
// machine has one: LEPC, by which compilers find the return address of a call to the driver's own functions (printf).
// So code_range() reads the global timer twice, and what the compiler made of that is replaced in the compiled kernel,
// once by LEPC of the next instruction and once by LEPC of the function's end (name_code_range() of compile/cubin.cpp).
// Where that did not happen the two are times, in nanoseconds since 1970, which no address of a GPU is as large as.
#pragma once

#include "constants.h"

namespace hypermla::cute {

struct CodeRange {
  u64 begin = 0, end = 0;  // from about here to the end of the kernel's function; both 0 where that is not known
};
__device__ __forceinline__ CodeRange code_range() {
  u64 a, b;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(a));
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(b));
  if ((a | b) >> 49) return {};
  return {min(a, b), max(a, b)};
}

// Asks L2 for the 128 bytes that hold an address.
__device__ __forceinline__ void prefetch_line(u64 address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

}  // namespace hypermla::cute
