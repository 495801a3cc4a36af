// Development logs: docs/log/<kernel>.md, in which every version has an entry.
//
//   ## Version v1 of cute.mla.flash_mla_v1
//
//   - Location: `kernels/cute/mla/flash_mla/flash_mla_v1`
//   - Changed: what is new
//   - Why: what it was to show
//   - Measured: device, driver, clocks, problem, mode, date, [profile](../../results/...)
//   - Baseline: the version before, date, [profile](...)
//
//   | metric | value | before | change |      rows: times, rates, occupancy, tensor pipe
//
//   - Bottleneck: class, confidence, evidence
//   - Insight: what the next version should know
//
// From "Measured" to "Bottleneck" everything comes from profiles; people write the rest, items of their own between
// those, too. A version without a profile has in its place
//
//   - Measured: figures of a benchmark, each of them held by its [record](../../results/...); or none
//   - Not profiled: why
//
// Where a profile is there later, link it behind "Measured:" (and another behind "Baseline:"): lint --fix writes the
// rest.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "hypermla/profile/rules.h"

namespace hypermla {

struct DevlogVersion {
  std::string kernel;         // cute.mla.flash_mla_v1
  std::string version;        // v1
  std::string directory;      // kernels/cute/mla/flash_mla/flash_mla_v1
  bool draft = false;         // its profile need not be kept
  bool only_decodes = false;  // it is for MlaDecode: a benchmark's record stands for the profile
};

struct DevlogRun {
  Profile profile;             // judged
  std::filesystem::path path;  // of its profile.json
};

struct DevlogTexts {
  std::string changed, why, insight;
};

// Throws Error where a text states a figure with a unit (ns, us, ms, s, %, x, TFLOP/s, GB/s, TB/s, W, MHz, GHz, J, mJ,
// or "microseconds", "percent", "times" and the like) that no field of the runs, or of one against the other, rounds
// to. `what` names the text.
void require_measured(const std::string& what, const std::string& text, const DevlogRun& run,
                      const std::optional<DevlogRun>& baseline);

// Adds the entry of a version to its log below <root>/docs/log and returns the log. A version without a log of its own
// goes to that of its design, which is made where there is none. Throws Error where the version has an entry, the run
// is of another kernel, the baseline of another problem, or a text states what was not measured.
std::filesystem::path add_devlog_entry(const std::filesystem::path& root, const DevlogVersion& version,
                                       const DevlogTexts& texts, const DevlogRun& run,
                                       const std::optional<DevlogRun>& baseline);

// What is wrong: versions without an entry; entries of no version, with a part missing, or with neither a profile nor a
// reason why there is none; and figures and bottlenecks that are not those of the profiles and records that an entry
// links. Sentences that begin with the file.
std::vector<std::string> lint_devlogs(const std::filesystem::path& root, const std::vector<DevlogVersion>& versions,
                                      const Rules& rules);

// Writes the measured half of entries anew whose linked profiles hold other figures now, as after a kernel was measured
// again, or are judged otherwise; what people wrote stays. Returns the kernels.
std::vector<std::string> refresh_devlogs(const std::filesystem::path& root, const Rules& rules);

// Whether docs/log has a log of that name: a version that was removed keeps its number.
bool has_devlog(const std::filesystem::path& root, const std::string& design, int version);

}  // namespace hypermla
