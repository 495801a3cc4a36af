// What a long command is doing, on standard error.
#pragma once

#include <string>

namespace hypermla {

class Progress {
 public:
  // On a terminal one line, no wider than the terminal, that the next call rewrites; `share` of the work, from 0 to 1,
  // draws a bar in front. Elsewhere nothing.
  void show(const std::string& text, double share = -1);
  // The same for a step of which nothing more is heard until it ends; elsewhere it is a line of its own.
  void say(const std::string& text);
  // A line that stays, in place of the present one.
  void keep(const std::string& text);
  void clear();
  ~Progress() { clear(); }

 private:
  bool shown_ = false;
};

}  // namespace hypermla
