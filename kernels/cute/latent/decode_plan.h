// The latent kernels as an engine calls them (src/hypermla/plan/decode.h): a plan on the device once per step, then a
// launch per layer over the caller's pointers. A launch copies a struct of arguments. What every caller of these
// kernels must tell them is declared here, too: work lists, limits of requests.
#pragma once

#include <functional>
#include <limits>

#include "cute/latent/arguments.h"
#include "cute/latent/plan_requests.h"
#include "cute/latent/tensor_maps.h"
#include "cute/latent/work_plan.h"
#include "hypermla/plan/decode.h"

namespace hypermla::cute {

// What a version of the latent kernel is, with one of its tilings.
struct LatentVersion {
  std::string name, header;  // of its kernel
  LaunchShape shape;
  int rows = 64;            // of a tile
  int query_groups = 2;     // of 64 columns, in a box of latent queries
  bool gathers_fp8 = true;  // tokens of FP8 one by one, whatever their pages; else as boxes of pairs of bytes
  WorkCosts costs = {};
  float traffic = 0;   // PlanRequestsArguments
  bool joins = false;  // likewise
  // Token blocks that L2 is asked for ahead (LatentArguments), where there are at most so many row tiles.
  int ahead = 0;
  std::int64_t ahead_tiles = std::numeric_limits<std::int64_t>::max();
};

// A work list and what belongs to it, in device memory.
struct WorkLists {
  WorkItem* items = nullptr;     // [workers, rounds]
  MergeState* merges = nullptr;  // [slots]
  int* status = nullptr;         // of a list that a planner makes; null: the host has made it
  void* o_part = nullptr;
  float* lse_part = nullptr;
  int workers = 0, rounds = 0;
};

// How requests may be.
struct RequestLimits {
  int heads = 0, queries = 0, max_tokens = 0;  // queries and tokens of a request
  int all_queries = 0;
};

// Token blocks that L2 is asked for ahead, for requests of so many queries at most. 0: none.
int blocks_ahead(const LatentVersion& version, int requests, int heads, int queries);

// What a planner is told but for the requests, and the attention but for the tensors.
PlanRequestsArguments planner_arguments(const LatentVersion& version, const WorkLists& lists,
                                        const RequestLimits& limits);
LatentArguments attention_arguments(const WorkLists& lists, int heads, float scale, bool lse_base2,
                                    bool empty_lse_positive);

// Tokens of a request in this cache, at most: those of the first of its shards, so that all have the same kernels.
int most_tokens_here(const MlaDecodeOptions& options);

// A version for a capacity.
struct LatentDecodeSpec {
  LatentVersion version;
  std::function<double(const DeviceSpec&, int tokens)> seconds;  // as DecodeKernels::seconds()
  KernelSource attention, planner;
  int workers = 0;
};

class LatentDecode : public DecodeKernels {
 public:
  LatentDecode(const MlaDecodeOptions& options, LatentDecodeSpec spec);

  double seconds(const DeviceSpec& device, int tokens) const override { return spec_.seconds(device, tokens); }
  std::string explain() const override;
  std::size_t workspace_bytes() const override { return workspace_bytes_; }
  std::vector<KernelSource> sources() const override { return {spec_.attention, spec_.planner}; }
  void prepare(Compiler& compiler, Device& device, void* workspace) override;
  void plan(const int* lengths, const int* query_starts, int requests, const int* block_table,
            std::int64_t table_stride, StreamHandle stream) override;
  void run(const MlaDecodeTensors& tensors, StreamHandle stream) override;
  int status() const override;
  const PlanRequestsArguments& planned() const { return plan_; }  // behind prepare()

 private:
  void set_queries(const MlaDecodeTensors& with);
  void set_cache(const MlaDecodeTensors& with);

  MlaDecodeOptions options_;
  LatentDecodeSpec spec_;
  RequestListSizes sizes_;
  std::size_t items_at_, merges_at_, lse_part_at_, o_part_at_, workspace_bytes_;  // bytes; the status is first
  std::shared_ptr<Device> device_;
  std::unique_ptr<Function> attention_, planner_;
  PlanRequestsArguments plan_ = {};
  LatentArguments with_ = {};
  MlaDecodeTensors last_;  // what with_ was made from
  TensorMapCache maps_;
};

}  // namespace hypermla::cute
