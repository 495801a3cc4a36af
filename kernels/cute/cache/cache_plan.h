// How the kernels of MlaCacheOps are called (src/hypermla/plan/cache_ops.h): what they are given, and on how many
// blocks.
#pragma once

#include "cute/cache/cache_ops.h"
#include "hypermla/plan/cache_ops.h"

namespace hypermla::cute {

MergeStatesArguments arguments_of(const MlaCacheOps::Merge& with);
unsigned blocks_of(const MergeStatesArguments& of);
AppendArguments arguments_of(const MlaCacheOps::Append& with);
unsigned blocks_of(const AppendArguments& of);

}  // namespace hypermla::cute
