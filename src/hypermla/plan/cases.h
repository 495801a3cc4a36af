// The problems that prove a kernel: edges of every dimension, for any plan with the usual field names.
#pragma once

#include <vector>

#include "hypermla/plan/plan.h"

namespace hypermla {

// Small problems for correctness: s from 1 to 129, ragged t, h from 1 to 128, every dtype, causal or not.
std::vector<Json> correctness_cases(KernelPlan& plan);

// The problems that deployments see, for ahead-of-time compilation: s = 1, 16, 32, 64, 128 at b = 32, t = 4096.
std::vector<Json> representative_problems(KernelPlan& plan);

}  // namespace hypermla
