// The kernels whose figures the parts of the hybrid for CUDA Tile have.
#pragma once

#include "mla/hybrid/hybrid_time.h"

namespace hypermla {

// `parts`, which says what is particular to a version, with all the others.
inline HybridParts of_cutile(HybridParts parts) {
  parts.latent = figures_of("cutile.mla.flash_mla");
  parts.decompressed = parts.shared = figures_of("cutile.mla.flash_attention");
  parts.combine = figures_of("cutile.mla.decompress_combine").front();
  return parts;
}

}  // namespace hypermla
