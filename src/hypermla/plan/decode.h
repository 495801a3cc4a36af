// The kernels behind MlaDecode (include/hypermla/mla_decode.h): a planner that runs once per step, and attention that
// runs once per layer with the caller's pointers. A version of a kernel that can be called so says it by
// KernelPlan::decode().
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hypermla/compile/compiler.h"
#include "hypermla/device/device.h"
#include "hypermla/mla_decode.h"
#include "hypermla/roofline/device_spec.h"

namespace hypermla {

class DecodeKernels {
 public:
  virtual ~DecodeKernels() = default;

  // How long an attention of as many requests and queries as may be takes, all of so many tokens, by the kernel's own
  // account, as expected_seconds().
  virtual double seconds(const DeviceSpec& device, int tokens) const = 0;
  virtual std::string explain() const = 0;
  virtual std::size_t workspace_bytes() const = 0;
  // What prepare() compiles.
  virtual std::vector<KernelSource> sources() const { return {}; }
  // Compiles, loads, and takes its workspace. Comes first.
  virtual void prepare(Compiler& compiler, Device& device, void* workspace) = 0;
  // As MlaDecode's. `requests` is within the capacity; there is a block table where prefixes are shared.
  virtual void plan(const int* lengths, const int* query_starts, int requests, const int* block_table,
                    std::int64_t table_stride, StreamHandle stream) = 0;
  virtual void run(const MlaDecodeTensors& tensors, StreamHandle stream) = 0;
  // What the last plan found wrong, as bits: kWrongTokens, kWrongQueries. Waits for the device.
  virtual int status() const = 0;
};

// By which the fastest is chosen: the geometric mean of its seconds() over lengths up to the capacity, since requests
// are seldom as long as they may be. Lists of chosen tokens are.
double usual_seconds(const DecodeKernels& kernels, const DeviceSpec& device, const MlaDecodeOptions& options);

enum DecodeStatus : int { kWrongTokens = 1, kWrongQueries = 2 };

// Throws Error for options without a meaning. Afterwards max_query_tokens and scale are set.
void settle(MlaDecodeOptions& options);

// What explain() adds where others have tokens of the requests, too; else nothing.
std::string explain_shards(const MlaDecodeOptions& options);

// The splits that are compiled ahead of time, growing; the last one cuts no request.
std::vector<int> fixed_splits();
// The least of them for settled options with which `workspace_bytes` are at most `bytes`, else one that cuts nothing.
int fixed_split(MlaDecodeOptions options, std::size_t bytes,
                const std::function<std::size_t(const MlaDecodeOptions&)>& workspace_bytes);

// Throws Error for tensors that no kernel takes: a missing pointer, a stride or an address that is not aligned.
void require_tensors(const MlaDecodeOptions& options, const MlaDecodeTensors& tensors);

// The same on a CPU, in fp32 and without tiles: what everything else is checked against.
std::unique_ptr<DecodeKernels> make_decode_reference(const MlaDecodeOptions& options);

}  // namespace hypermla
