#include "hypermla/device/architecture.h"

#include <algorithm>

namespace hypermla {

const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> kAll = {
      {.name = "sm_80", .processors = 108, .shared_kb = 163},
      {.name = "sm_86", .processors = 84, .shared_kb = 99},
      {.name = "sm_87", .processors = 16, .shared_kb = 163},
      {.name = "sm_89", .processors = 128, .shared_kb = 99},
      {.name = "sm_90", .processors = 132, .shared_kb = 227, .tma = true, .runs_cute = true},
      {.name = "sm_100", .processors = 148, .shared_kb = 227, .tma = true},
      {.name = "sm_103", .processors = 148, .shared_kb = 227, .tma = true},
      {.name = "sm_120", .processors = 170, .shared_kb = 99, .tma = true},
      {.name = "sm_121", .processors = 48, .shared_kb = 99, .tma = true},
  };
  return kAll;
}

Architecture architecture(const std::string& arch) {
  const auto found = std::find_if(architectures().begin(), architectures().end(),
                                  [&](const Architecture& one) { return one.name == arch; });
  return found == architectures().end() ? Architecture{} : *found;
}

}  // namespace hypermla
