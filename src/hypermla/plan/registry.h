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

// The version that a directory of a design holds: "v0" in one of the design's name, "v<N>" in <design>_v<N>, N = 1 to
// 999999; empty in any other.
std::string version_in(const std::string& directory, const std::string& design);

struct KernelEntry {
  std::string language;   // cutile
  std::string layer;      // mla
  std::string design;     // flash_attention
  std::string version;    // v0 (the base version), v1, ...
  std::string directory;  // below the kernel root: cutile/mla/flash_attention/flash_attention
  std::string summary;
  std::function<std::unique_ptr<KernelPlan>()> make;
  // A draft: listed, verified and tested like the others, but without a current record in results/verified.json. It
  // runs only where it is named in full or its language or version is pinned, never instead of a recorded kernel.
  bool draft = false;

  // Whether this language compiles for a target ("sm_90", "x86-64-v4").
  bool runs_on(const std::string& arch) const { return language != "cute" || architecture(arch).runs_cute; }
  std::string name() const { return version == "v0" ? design : design + "_" + version; }
  std::string full_name() const { return language + "." + layer + "." + name(); }
};

class Registry {
 public:
  static Registry& instance();

  void add(const std::string& source_file, std::string summary, std::function<std::unique_ptr<KernelPlan>()> make,
           bool draft = false);
  // Sorted by language, design and version number.
  std::vector<KernelEntry> all() const;

  // All that the words name, drafts too, whatever they run on; explicitly scheduled ones first, base versions before
  // others. `kernel` is a design (flash_attention), language.layer.design, or the name() or full_name() of a version;
  // '-' and '_' are the same. `version` is v0, v1, ...; empty leaves it open for a design. `language` pins one. Throws
  // Error naming the nearest kernel, or the versions there are.
  std::vector<KernelEntry> named(const std::string& kernel, const std::string& version = "",
                                 const std::string& language = "") const;
  // Those of them that may run on `arch`, drafts only if there is no other; configure() takes the fastest. Throws Error
  // also where none runs there, naming the language that would.
  std::vector<KernelEntry> find_all(const std::string& kernel, const std::string& version = "",
                                    const std::string& arch = "sm_90", const std::string& language = "") const;
  // The first of them.
  KernelEntry find(const std::string& kernel, const std::string& version = "", const std::string& arch = "sm_90",
                   const std::string& language = "") const {
    return find_all(kernel, version, arch, language).front();
  }

 private:
  std::vector<KernelEntry> entries_;
};

// The path below the kernel root of a file in the directory of another, for KernelSource::header. A plan names the
// kernel beside it by beside(__FILE__, "y.cuh").
std::string beside(const std::string& source_file, const std::string& name);

#define HYPERMLA_REGISTER(Plan, summary) HYPERMLA_REGISTER_AS(Plan, summary, false)
#define HYPERMLA_REGISTER_DRAFT(Plan, summary) HYPERMLA_REGISTER_AS(Plan, summary, true)
#define HYPERMLA_REGISTER_AS(Plan, summary, draft)                                                                  \
  namespace {                                                                                                       \
  [[maybe_unused]] const bool registered = (::hypermla::Registry::instance().add(                                   \
                                                __FILE__, summary, [] { return std::make_unique<Plan>(); }, draft), \
                                            true);                                                                  \
  }

}  // namespace hypermla
