// Element types of the tensors. Read by the host and, as part of a kernel's template arguments, by the device
// compilers, so it includes nothing.
#pragma once

namespace hypermla {

// The names are those of the command line (`--dtype bfloat16`). Accumulation is always fp32. int32 is the type of
// lengths and block tables; no kernel computes in it.
enum class DType : int { bfloat16, float16, float32, int32 };

}  // namespace hypermla
