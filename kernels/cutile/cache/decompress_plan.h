// decompress_prefix of MlaCacheOps in CUDA Tile C++: for the GPUs that have no kernel of their own for it.
#pragma once

#include <memory>
#include <vector>

#include "hypermla/compile/compiler.h"
#include "hypermla/device/device.h"
#include "hypermla/mla_cache.h"

namespace hypermla {

class PortableDecompress {
 public:
  static std::vector<KernelSource> sources(DType dtype);

  // Compiles and loads.
  PortableDecompress(DType dtype, Compiler& compiler, Device& device);
  // Of what was found to be valid, with work in it.
  void run(const MlaCacheOps::Decompress& with, StreamHandle stream);

 private:
  enum { kLatentOuter, kLatentInnermost, kRope };  // as sources() has them
  std::vector<std::unique_ptr<Function>> functions_;
};

}  // namespace hypermla
