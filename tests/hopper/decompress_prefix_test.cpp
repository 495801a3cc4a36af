// decompress_prefix for Hopper, run as plain C++ over the cases of the CPU.
#include "emulated_hopper.h"

#include "../unit/cache_cases.h"
#include "cache/decompress_prefix.cuh"
#include "cute/cache/cache_plan.h"

namespace hypermla::cute {
namespace {

TEST(HopperKernels, DecompressAPrefix) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE(seed);
    cache_cases::DecompressCase of(seed, 0, 200, 4);
    std::vector<unsigned char> bytes = of.memory.bytes;
    const MlaCacheOps::Decompress call = of.on(reinterpret_cast<char*>(bytes.data()));
    DecompressPrefixArguments with = arguments_of(call, 2 + seed % 3);
    with.weights[0] = emulated::map_of(call.w_uk.data, weights_shape(call, 0));
    with.weights[1] = emulated::map_of(call.w_uv.data, weights_shape(call, 1));
    emulated::run(int(blocks_of(with)), kPrefixThreads, [&] {
      of.dtype == DType::bfloat16 ? decompress_prefix<DType::bfloat16>(with) : decompress_prefix<DType::float16>(with);
    });
    of.compare(bytes);
  }
}

}  // namespace
}  // namespace hypermla::cute
