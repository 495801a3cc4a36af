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
  // Told before kernels run, with their present tilings; may be empty.
  std::function<void(KernelPlan&, Executable&)> begin;
  // Called several times a second while compilers are waited for, and between measurements. What it throws ends the
  // tuning; what was measured is remembered. May be empty.
  std::function<void()> poll;
};

struct AutotuneResult {
  struct Stage {
    std::string kernel = {};
    Json tiling = {};
    std::filesystem::path history = {};  // autotuning.json
    int measured = 0;                    // in this call; 0 when everything was remembered
    Tuner::LeftOut rejected = {};        // they do not compile or run, as this call or an earlier one found
    Tuner::LeftOut skipped = {};         // they could not be compiled or loaded now: the next call tries them again
  };
  std::vector<Stage> stages;
};

// Measures the whole executable for every candidate of one kernel at a time, in launch order, since a stage also
// affects the stages behind it (cache contents). The executable is left prepared with the best tilings. Candidates that
// the compiler refuses or that do not run are rejected: remembered with the reason and the compiler. Those that could
// not be compiled or loaded for another reason, such as a full disk, are skipped. Throws Error when none is left.
AutotuneResult autotune(KernelPlan& plan, Executable& executable, Compiler& compiler, Device& device,
                        const DeviceSpec& spec, const AutotuneOptions& options);

// For the user: a sentence for every kernel and reason for which tilings were left out.
std::vector<std::string> remarks(const AutotuneResult& result);

}  // namespace hypermla
