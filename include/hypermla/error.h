// The library's one exception type. Its message is one sentence that says what was wrong and what to do next; the
// library itself neither prints nor exits.
#pragma once

#include <stdexcept>

#if defined(__GNUC__)
#define HYPERMLA_API __attribute__((visibility("default")))
#else
#define HYPERMLA_API
#endif

namespace hypermla {

class HYPERMLA_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace hypermla
