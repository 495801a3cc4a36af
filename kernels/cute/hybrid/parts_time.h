// The kernels whose figures the parts of the hybrid for Hopper have.
#pragma once

#include "mla/hybrid/hybrid_time.h"

namespace hypermla::cute {

// `parts`, which says what is particular to a version, with all the others.
inline HybridParts of_cute(HybridParts parts) {
  parts.latent = figures_of({"cute.mla.flash_mla", "cute.mla.flash_mla_v1"});
  parts.decompressed = figures_of({"cute.mla.flash_attention", "cute.mla.flash_attention_v1"});
  // A prefix is cut until its tiles fill the processors (docs/kernels/cute-mla-var6-plus.md).
  parts.shared = figures_of({"cute.mla.flash_attention"});
  for (Figures& one : parts.shared) one.readers = 0;
  parts.combine = figures_of({"cute.mla.decompress_combine"}).front();
  return parts;
}

}  // namespace hypermla::cute
