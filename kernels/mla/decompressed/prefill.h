// Prefill over decompressed keys and values as engines call it (MlaPrefill): what kernels in every language know of it
// when they are compiled. Read by the host and, as a template argument, by the device compilers.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

struct PrefillProblem {
  DType dtype = DType::bfloat16;
  bool causal = true;
  bool rows = false;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("dtype", self.dtype, "element type of all tensors but the log-sum-exp");
    field("causal", self.causal, "query i of n sees the tokens up to tokens - n + i only");
    field("rows", self.rows, "the plan says in which rows of the tensors its queries are");
  }
};

}  // namespace hypermla
