// The kernels that the parts of the hybrid for Hopper are, and whose figures they have.
#pragma once

#include "hypermla/plan/configure.h"
#include "mla/hybrid/hybrid_time.h"

namespace hypermla::cute {

// Every version of a design that attends as a kernel of its own; with a `field`, those whose problem has it.
inline std::vector<KernelEntry> versions_of(const std::string& design, const char* field = nullptr) {
  std::vector<KernelEntry> all = Registry::instance().find_all(design, "", "sm_90", "cute");
  std::erase_if(all, [&](const KernelEntry& entry) {
    const std::unique_ptr<KernelPlan> plan = entry.make();
    return plan->only_decodes() || (field && known_fields(*plan, {{field, 0}}).empty());
  });
  return all;
}

// `parts`, which says what is particular to a version, with all the others.
inline HybridParts of_cute(HybridParts parts) {
  parts.latent = figures_of(versions_of("flash_mla"));
  if (parts.decompressed.empty()) parts.decompressed = figures_of(versions_of("flash_attention"));
  // A prefix is cut until its tiles fill the processors (docs/kernels/cute-mla-var6-plus.md).
  parts.shared = figures_of(versions_of("flash_attention", "prefixes"));
  for (Figures& one : parts.shared) one.readers = 0;
  parts.combine = figures_of("cute.mla.decompress_combine").front();
  return parts;
}

}  // namespace hypermla::cute
