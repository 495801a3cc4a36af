// The decompressed kernel for many queries as an engine calls it (src/hypermla/plan/prefill.h): a plan on the device
// once per step, then one launch per layer over the caller's pointers.
#pragma once

#include "cute/decompressed/prefill_list.h"
#include "hypermla/device/tensor_map.h"
#include "hypermla/plan/plan.h"

namespace hypermla::cute {

class PrefillPlan : public PrefillKernels {
 public:
  PrefillPlan(const MlaPrefillOptions& options, const Target& target)
      : options_(options), processors_(target.processors) {}

  std::string explain() const override;
  std::size_t workspace_bytes() const override;
  std::vector<KernelSource> sources() const override;
  void prepare(Compiler& compiler, Device& device, void* workspace) override;
  void plan(const PrefillStep& step, StreamHandle stream) override;
  void run(const MlaPrefillTensors& tensors, StreamHandle stream) override;
  int status() const override;

 private:
  void set(const MlaPrefillTensors& with);
  std::size_t slots() const { return options_.batch_invariant ? 0 : prefill_slots(processors_); }
  // Bytes of the workspace before the counters of parts, the queries' rows, and the parts.
  std::size_t arrived_at() const;
  std::size_t rows_at() const;
  std::size_t parts_at() const;

  MlaPrefillOptions options_;
  int processors_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Function> attention_, planner_;
  PlanPrefillArguments plan_ = {};
  PrefillArguments with_ = {};
  MlaPrefillTensors last_;  // what with_ was made from
  TensorMapCache maps_;
};

}  // namespace hypermla::cute
