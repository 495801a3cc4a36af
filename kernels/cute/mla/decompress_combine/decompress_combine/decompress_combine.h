// The last step of an attention in parts, on Hopper: the value projection of the latent parts and the merge of all
// parts. The tiling. Read by the host and, as a template argument of the kernel, by the device compiler.
#pragma once

#include "mla/combine/combine.h"

namespace hypermla::cute {

inline constexpr unsigned kDecompressCombineSharedBytes = 229632;  // of a thread block, see the kernel's Shared

struct DecompressCombineTiling {
  int blocks = 1;
  bool keep = false;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("blocks", self.blocks, "thread blocks per head, which share its rows");
    field("keep", self.keep, "leave the rows that were read in L2 as long as other data");
  }
};

}  // namespace hypermla::cute
