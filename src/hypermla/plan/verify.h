// The correctness cases of a version on a device, and the record of what a device has proved.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "hypermla/plan/registry.h"

namespace hypermla {

struct Tally {
  int cases = 0, failed = 0;
  std::map<std::string, double> worst;  // relative error by output
};

struct VerifyHooks {
  // Told what failed, in some lines. May be empty.
  std::function<void(const std::string&)> say = {};
  // Told before every case what it is, in some lines; what it throws ends the work. May be empty.
  std::function<void(const std::string&)> begin = {};
  std::uint64_t seed = 0;  // of the random inputs; 0: of the time
};

// Runs every case of plan/cases.h against the reference, with its default tiling and some with every candidate, and
// what MlaDecode would run on those of plan/decode_cases.h. Throws Error where a kernel does not compile or run.
Tally verify(const KernelEntry& entry, const std::shared_ptr<Device>& device, Compiler& compiler,
             const VerifyHooks& hooks = {});

// Of every kernel that some case runs, by its name.
Json fingerprints(const KernelEntry& entry, const Compiler& compiler);

// Records, by kernel and device. An absent file has none; one that holds anything else is refused, not overwritten.
Json read_records(const std::filesystem::path& path);
// Whether some device has passed all cases of the version as its sources are now, and as its plan launches them where
// the record says what was launched.
bool has_record(const Json& records, const KernelEntry& entry, const Compiler& compiler);
// Why and since when the version, with its sources of now, waits for a GPU to be recorded on; none where no call of
// verify said so.
std::optional<std::string> awaits_gpu(const Json& records, const KernelEntry& entry, const Compiler& compiler);
// Adds or replaces one: fingerprints, launches, architecture, driver, date, cases and worst errors. A GPU's ends the
// waiting.
void record(const std::filesystem::path& path, const KernelEntry& entry, const Tally& tally, const Device& device,
            const Compiler& compiler);
// Says so of a version that changed where there was no GPU. It holds for the sources as they are now and no others.
void record_waiting(const std::filesystem::path& path, const KernelEntry& entry, const std::string& why,
                    const Compiler& compiler);

}  // namespace hypermla
