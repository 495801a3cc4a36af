// What is undefined on a GPU ends a kernel here with an exception, which hypermla_run_block reports.
#pragma once

#include <stdexcept>
#include <string>

namespace cuda::tiles {

class Trap : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace host {

[[noreturn, gnu::noinline, gnu::cold]] inline void trap(std::string message) { throw Trap(std::move(message)); }

}  // namespace host
}  // namespace cuda::tiles
