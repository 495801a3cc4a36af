// The time in UTC, as records and directory names carry it.
#pragma once

#include <ctime>
#include <string>

namespace hypermla {

// Now, in a format of strftime: "%Y-%m-%d".
inline std::string utc_now(const char* format = "%Y-%m-%d") {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, format, &utc);
  return text;
}

}  // namespace hypermla
