#include "hypermla/cli/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace hypermla {
namespace {

constexpr std::size_t kBar = 24, kLeastBar = 8;  // columns

bool on_terminal() { return ::isatty(STDERR_FILENO); }

// A terminal that does not say how wide it is gets 80 columns. In the last one some terminals wrap already.
std::size_t columns() {
  winsize size{};
  const bool known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
  return std::size_t(known ? size.ws_col : 80) - 1;
}

}  // namespace

void Progress::show(const std::string& text, double share) {
  if (!on_terminal()) return;
  const std::size_t width = columns(), left = width - std::min(width, text.size() + 3);
  std::string line;
  if (share >= 0 && left >= kLeastBar) {  // the words matter more than the bar
    const std::size_t bar = std::min(kBar, left), done = std::min(bar, std::size_t(double(bar) * share));
    line = fmt::format("[{:=<{}}{: <{}}] ", "", done, "", bar - done);
  }
  print_error("\r\033[K" + (line + text).substr(0, width));
  std::fflush(stderr);
  shown_ = true;
}

void Progress::say(const std::string& text) {
  if (on_terminal())
    show(text);
  else
    keep(text);
}

void Progress::keep(const std::string& text) {
  clear();
  print_error(text + "\n");
}

void Progress::clear() {
  if (shown_) print_error("\r\033[K");
  std::fflush(stderr);
  shown_ = false;
}

}  // namespace hypermla
