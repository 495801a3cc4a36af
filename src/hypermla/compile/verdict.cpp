#include "hypermla/base/error.h"
#include "hypermla/base/pattern.h"
#include "hypermla/compile/backends.h"

namespace hypermla {
namespace {

// An error with its place in the source, as g++, clang++, NVRTC, ptxas and tileiras write it. What they write of a full
// disk, of a lack of memory, of a wrong flag or of a missing file has no place, or is a fatal error.
const Pattern kInSource(R"(:\d+: error: |\(\d+\): error: |ptxas error |line \d+; error|error\[)");
// A file that is not there: a mistake in the source, or in what is installed.
const Pattern kAbsent(
    R"(fatal error: [^\n]*(No such file|file not found)|catastrophic error: cannot open source file)");
const Pattern kCause("error|fatal|failed|memory|no space", Pattern::Case::any);

// From the line of the first match: a template's backtrace is of no use in one sentence.
std::string excerpt(const std::string& log, const Pattern& wanted) {
  const std::optional<Pattern::Found> found = wanted.search(log);
  const std::size_t end_of_line = found ? log.rfind('\n', found->begin) : std::string::npos;
  const std::string part = log.substr(end_of_line == std::string::npos ? 0 : end_of_line + 1, 600);
  return part.substr(0, part.find_last_not_of('\n') + 1);
}

}  // namespace

void fail_compilation(const BackendInput& input, const std::string& compiler, int status, const std::string& log) {
  if (status < 128 && kInSource.search(log))
    throw CompileError(
        fmt::format("{} does not compile for {}: {}", input.instance, input.arch, excerpt(log, kInSource)));
  if (status < 128 && kAbsent.search(log)) {
    const std::string said = excerpt(log, kAbsent);  // the lines behind the first show the place
    fail("{} could not compile {} for {}: {}", compiler, input.instance, input.arch, said.substr(0, said.find('\n')));
  }
  const std::string cause = excerpt(log, kCause);
  fail("{} could not compile {} for {}, and the source is not the cause: {}", compiler, input.instance, input.arch,
       cause.empty() ? fmt::format("it ended with status {} and said nothing", status) : cause);
}

}  // namespace hypermla
