// What check_kernel() and verify_kernels() of hypermla.h return: plain values.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace hypermla {

// One output for one kind of inputs, against the reference (docs/checking.md says how far it may be off).
struct CheckedOutput {
  std::string inputs;  // "random inputs", "growing scores", "t=333"
  std::string output;  // "o"
  bool passed = false;
  double relative_error = 0;  // the norm of the difference over the norm of the reference
};

struct CheckSummary {
  bool passed = false;     // all outputs
  std::string kernel;      // the version that ran, "cutile.mla.flash_attention_v7"
  std::uint64_t seed = 0;  // of the inputs
  std::vector<CheckedOutput> outputs;
};

// All correctness cases of one version.
struct VerifySummary {
  std::string kernel;  // "cutile.mla.flash_attention"
  int cases = 0, failed = 0;
  std::map<std::string, double> worst_relative_errors;  // by output
  std::string failures;                                 // some lines for each case that failed
};

}  // namespace hypermla
