// What is undefined on a GPU ends a kernel here with an exception, which hypermla_run_block reports.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <exception>

namespace cuda::tiles {

class Trap : public std::exception {
 public:
  // As vprintf.
  Trap(const char* format, std::va_list values) noexcept { std::vsnprintf(text_, sizeof text_, format, values); }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[256];
};

namespace host {

// As printf. With std::string instead, at every place that may trap, a kernel takes a quarter longer to compile.
[[noreturn, gnu::noinline, gnu::cold, gnu::format(printf, 1, 2)]] inline void trap(const char* format, ...) {
  std::va_list values;
  va_start(values, format);
  const Trap trap(format, values);
  va_end(values);
  throw trap;
}

}  // namespace host
}  // namespace cuda::tiles
