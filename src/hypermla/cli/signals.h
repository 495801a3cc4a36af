#pragma once

#include <string>

namespace hypermla {

// Ends what run_process() has started when a signal ends this program: Ctrl-C reaches this process only, since programs
// run in process groups of their own. To be called before there is a second thread.
void end_programs_with_this_one();

// For a program that run_process() has started: it ends when the thread that waits for it does, even by SIGKILL. Throws
// Error when the process `caller`, which started it, has ended already.
void end_with_the_caller(int caller);

// Kernels run in this process on a CPU, and so does the host part of a kernel file: what they break ends it. From the
// first call on it says `sentence`, the newest one, then, and ends with status 2; what was printed before is out.
void say_where_it_crashes(const std::string& sentence);
// That end; for what no signal tells of.
[[noreturn]] void end_as_crashed();

}  // namespace hypermla
