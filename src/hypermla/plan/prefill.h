// The kernels behind MlaPrefill (include/hypermla/mla_prefill.h): a planner that runs once per step, and attention that
// runs once per layer with the caller's pointers. A version of a kernel that can be called so says it by
// KernelPlan::prefill().
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hypermla/compile/compiler.h"
#include "hypermla/device/device.h"
#include "hypermla/mla_prefill.h"

namespace hypermla {

// What MlaPrefill::plan() is given; query_rows with MlaPrefillOptions::query_rows, else none.
struct PrefillStep {
  const int *query_starts, *token_starts, *query_rows;
  int requests;  // within the capacity
};

class PrefillKernels {
 public:
  virtual ~PrefillKernels() = default;

  virtual std::string explain() const = 0;
  virtual std::size_t workspace_bytes() const = 0;
  virtual std::vector<KernelSource> sources() const = 0;
  // Compiles, loads, and takes its workspace. Comes first.
  virtual void prepare(Compiler& compiler, Device& device, void* workspace) = 0;
  // As MlaPrefill's.
  virtual void plan(const PrefillStep& step, StreamHandle stream) = 0;
  virtual void run(const MlaPrefillTensors& tensors, StreamHandle stream) = 0;
  // What the last plan found wrong, as bits of PrefillStatus. Waits for the device.
  virtual int status() const = 0;
};
enum PrefillStatus : int { kWrongTokenStarts = 1, kWrongQueryStarts = 2 };

// Throws Error for options without a meaning. Afterwards scale is set.
void settle(MlaPrefillOptions& options);

// Throws Error for tensors that no kernel takes: a missing pointer, a stride or an address that is not aligned.
void require_tensors(const MlaPrefillOptions& options, const MlaPrefillTensors& tensors);

// Kernels of MlaPrefillOptions::accumulate: the given ones, whose outputs are merged into what is there.
std::unique_ptr<PrefillKernels> accumulating(std::unique_ptr<PrefillKernels> kernels, const MlaPrefillOptions& options);

// The same on a CPU, in fp32 and without tiles: what everything else is checked against.
std::unique_ptr<PrefillKernels> make_prefill_reference(const MlaPrefillOptions& options);

}  // namespace hypermla
