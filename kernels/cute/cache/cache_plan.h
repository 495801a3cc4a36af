// How the kernels of MlaCacheOps are called (src/hypermla/plan/cache_ops.h): what they are given, and on how many
// blocks.
#pragma once

#include "cute/cache/cache_ops.h"
#include "hypermla/device/tensor_map.h"
#include "hypermla/plan/cache_ops.h"

namespace hypermla::cute {

MergeStatesArguments arguments_of(const MlaCacheOps::Merge& with);
unsigned blocks_of(const MergeStatesArguments& of);
AppendArguments arguments_of(const MlaCacheOps::Append& with);
unsigned blocks_of(const AppendArguments& of);      // of append
unsigned fp8_blocks_of(const AppendArguments& of);  // of append_fp8
unsigned fp8_576_blocks_of(const AppendArguments& of);
SplitArguments arguments_of(const MlaCacheOps::Split& with);
unsigned match_blocks_of(const SplitArguments& of);
unsigned split_blocks_of(const SplitArguments& of);
// Without the maps of the weights, which are of these shapes: w_uk (0) and w_uv (1).
DecompressPrefixArguments arguments_of(const MlaCacheOps::Decompress& with, int processors);
unsigned blocks_of(const DecompressPrefixArguments& of);
TensorMapShape weights_shape(const MlaCacheOps::Decompress& with, int product);

}  // namespace hypermla::cute
