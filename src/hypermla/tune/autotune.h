// Finds the best tiling of every kernel of an executable on a device. Compiles ahead in the background, measures, and
// saves the results.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include "hypermla/plan/plan.h"
#include "hypermla/tune/tuner.h"

namespace hypermla {

struct AutotuneOptions {
  std::filesystem::path history_root;  // of the results; see tune/history.h
  bool retune = false;                 // forget what was measured before
  TunerOptions tuner;
  // Told before every step, and at the end of a kernel where there was one; may be empty.
  struct Progress {
    std::string kernel;
    std::string doing;  // "compiling", "measuring", "comparing the best" or "done"
    // Of the candidates: those with a time, those without one for good, and how many there will be of both.
    int measured = 0, rejected = 0, planned = 0;
    double best_seconds = 0;  // 0: none yet
  };
  std::function<void(const Progress&)> progress;
};

struct AutotuneResult {
  struct Stage {
    std::string kernel;
    Json tiling;
    std::filesystem::path history;             // autotuning.json
    int measured = 0;                          // measurements in this call; 0 when everything was remembered
    std::map<std::string, int> rejected = {};  // why tilings do not work here, and how many for that
  };
  std::vector<Stage> stages;
};

// Measures the whole executable for every candidate of one kernel at a time, in launch order, since a stage also
// affects the stages behind it (cache contents). The executable is left prepared with the best tilings. Candidates that
// do not compile or run are rejected with the reason; throws Error when none is left.
AutotuneResult autotune(KernelPlan& plan, Executable& executable, Compiler& compiler, Device& device,
                        const DeviceSpec& spec, const AutotuneOptions& options);

}  // namespace hypermla
