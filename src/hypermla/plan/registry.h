// All kernels and versions of this build. A version registers itself with one line in its .cpp:
//
//   HYPERMLA_REGISTER(FlashAttentionPlan, "attention over decompressed keys and values")
//
// and its place, kernels/<language>/<layer>/<design>/<design>[_v<N>]/, gives its names.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hypermla/plan/plan.h"

namespace hypermla {

struct KernelEntry {
  std::string language;   // cutile
  std::string layer;      // mla
  std::string design;     // flash_attention
  std::string version;    // v0 (the base version), v1, ...
  std::string directory;  // below the kernel root: cutile/mla/flash_attention/flash_attention
  std::string summary;
  std::function<std::unique_ptr<KernelPlan>()> make;

  std::string name() const { return version == "v0" ? design : design + "_" + version; }
  std::string full_name() const { return language + "." + layer + "." + name(); }
};

class Registry {
 public:
  static Registry& instance();

  void add(const std::string& source_file, std::string summary, std::function<std::unique_ptr<KernelPlan>()> make);
  // Sorted by language, design and version number.
  std::vector<KernelEntry> all() const;

  // `kernel` is a design (flash_attention, any language) or language.layer.design; '-' and '_' are the same. `version` is
  // v0, v1, ...; empty means the base version, unless `kernel` is the name() or full_name() of another. Throws Error naming the nearest kernel or the versions there are.
  KernelEntry find(const std::string& kernel, const std::string& version = "") const;

 private:
  std::vector<KernelEntry> entries_;
};

// "kernels/.../x.cpp", "y.cuh" -> the path of y.cuh below the kernel root, for KernelSource::header: a plan names the kernel
// that lies beside it by beside(__FILE__, "y.cuh").
std::string beside(const std::string& source_file, const std::string& name);

#define HYPERMLA_REGISTER(Plan, summary)                                                                               \
  namespace {                                                                                                          \
  [[maybe_unused]] const bool registered =                                                                             \
      (::hypermla::Registry::instance().add(__FILE__, summary, [] { return std::make_unique<Plan>(); }), true);        \
  }

}  // namespace hypermla
