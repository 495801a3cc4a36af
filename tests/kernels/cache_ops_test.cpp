// The kernels of MlaCacheOps that are no product, for GPUs, run as C++ threads over the cases of the CPU.
#include "../unit/cache_cases.h"
#include "cute/cache/cache_plan.h"
#include "hopper/fragments.h"  // stands in for CUDA, which the kernels below need

#include "cache/append.cuh"
#include "cache/append_fp8.cuh"
#include "cache/append_fp8_576.cuh"
#include "cache/match_prefixes.cuh"
#include "cache/merge_states.cuh"
#include "cache/split_requests.cuh"

namespace hypermla::cute {
namespace {

using namespace cache_cases;

TEST(CacheKernels, MergeByLogSumExp) {
  device_threads::Block block(kCopyThreads);
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    MergeCase of(seed);
    std::vector<unsigned char> bytes = of.memory.bytes;
    const MergeStatesArguments with = arguments_of(of.on(reinterpret_cast<char*>(bytes.data())));
    block.run(int(blocks_of(with)), [&] {
      of.dtype == DType::bfloat16 ? merge_states<DType::bfloat16>(with) : merge_states<DType::float16>(with);
    });
    of.compare(bytes);
  }
}

TEST(CacheKernels, AppendToTheSlots) {
  device_threads::Block block(kCopyThreads);
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    AppendCase of(seed, 0, seed % 2 == 1);  // every other one with slots that the cache does not have
    std::vector<unsigned char> bytes = of.memory.bytes;
    const AppendArguments with = arguments_of(of.on(reinterpret_cast<char*>(bytes.data())));
    block.run(int(blocks_of(with)), [&] { append(with); });
    of.compare(bytes);
  }
}

TEST(CacheKernels, AppendInFp8) {
  device_threads::Block block(kCopyThreads);
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    AppendCase of(seed, 0, seed % 2 == 1, MlaCacheFormat::fp8_656);
    std::vector<unsigned char> bytes = of.memory.bytes;
    const AppendArguments with = arguments_of(of.on(reinterpret_cast<char*>(bytes.data())));
    block.run(int(fp8_blocks_of(with)), [&] {
      of.dtype == DType::bfloat16 ? append_fp8<DType::bfloat16>(with) : append_fp8<DType::float16>(with);
    });
    of.compare(bytes);
  }
}

TEST(CacheKernels, AppendInFp8WithOneFactor) {
  device_threads::Block block(kCopyThreads);
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    AppendCase of(seed, 0, seed % 2 == 1, MlaCacheFormat::fp8_576);
    std::vector<unsigned char> bytes = of.memory.bytes;
    const AppendArguments with = arguments_of(of.on(reinterpret_cast<char*>(bytes.data())));
    block.run(int(fp8_576_blocks_of(with)), [&] {
      of.dtype == DType::bfloat16 ? append_fp8_576<DType::bfloat16>(with) : append_fp8_576<DType::float16>(with);
    });
    of.compare(bytes);
  }
}

TEST(CacheKernels, SplitPrefixes) {
  device_threads::Block matching(kMatchThreads), splitting(kSplitThreads);
  for (unsigned seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    SplitCase of(seed);
    std::vector<unsigned char> bytes = of.memory.bytes;
    const SplitArguments with = arguments_of(of.on(reinterpret_cast<char*>(bytes.data())));
    if (with.count > 0) matching.run(int(match_blocks_of(with)), [&] { match_prefixes(with); });
    splitting.run(int(split_blocks_of(with)), [&] { split_requests(with); });
    of.compare(bytes);
  }
}

}  // namespace
}  // namespace hypermla::cute
