#include "hypermla/mla_decode.h"

#include <algorithm>
#include <cmath>

#include "hypermla/api/shared.h"
#include "hypermla/plan/decode.h"
#include "hypermla/plan/registry.h"
#include "hypermla/plan/typed_plan.h"

namespace hypermla {
namespace {

// The kernels for a capacity on a device: the pinned ones, else the fastest; on a CPU the reference.
std::unique_ptr<DecodeKernels> kernels_for(const MlaDecodeOptions& options, const Device& device) {
  if (!device.is_gpu() && options.kernel.empty()) return make_decode_reference(options);
  const PlannedDevice on = planned_device(shared().devices, device);
  const auto kernels_of = [&](const KernelEntry& entry) {
    const std::unique_ptr<KernelPlan> plan = entry.make();
    plan->target = on.target;
    return plan->decode(options);
  };
  std::unique_ptr<DecodeKernels> best;
  double least = INFINITY;
  for (const KernelEntry& entry : Registry::instance().all()) {
    if (!entry.runs_on(on.target.arch) || (options.kernel.empty() ? entry.draft : entry.full_name() != options.kernel))
      continue;
    std::unique_ptr<DecodeKernels> kernels = kernels_of(entry);
    if (!kernels) continue;
    const double seconds = usual_seconds(*kernels, on.spec, options);
    if (best && !(seconds < least)) continue;
    best = std::move(kernels);
    least = seconds;
  }
  if (!best && !options.kernel.empty())
    fail("kernel={} cannot decode on {} with these options; leave it empty, and explain() names the one that is taken",
         options.kernel, device.info().name);
  if (!best)
    for (const KernelEntry& entry : Registry::instance().all())
      if (entry.draft && entry.runs_on(on.target.arch) && kernels_of(entry))
        fail("only {0} takes these options, a draft that has no record of a GPU yet; pin it by kernel={0}",
             entry.full_name());
  if (!best)
    fail(
        "no decoding kernel for {} ({}) takes these options; caches in FP8, shards and shared prefixes need a Hopper "
        "GPU or a CPU",
        device.info().name, on.target.arch);
  return best;
}

MlaDecodeOptions settled(MlaDecodeOptions options) {
  settle(options);
  return options;
}

}  // namespace

struct MlaDecode::State {
  MlaDecodeOptions options;
  std::shared_ptr<Device> device;
  std::unique_ptr<DecodeKernels> kernels;
  Buffer workspace;
  std::int64_t queries = -1;  // of the last plan, as far as the host knows them; -1: there is none
};

MlaDecode::MlaDecode(const MlaDecodeOptions& options, const DeviceHandle& device, void* workspace)
    : state_(std::make_unique<State>()) {
  state_->options = settled(options);
  state_->device = device.device_;
  state_->kernels = kernels_for(state_->options, *state_->device);
  workspace = workspace_or_own(workspace, state_->kernels->workspace_bytes(), state_->device, state_->workspace);
  state_->kernels->prepare(shared().compiler, *state_->device, workspace);
}
MlaDecode::~MlaDecode() = default;
MlaDecode::MlaDecode(MlaDecode&&) noexcept = default;
MlaDecode& MlaDecode::operator=(MlaDecode&&) noexcept = default;

std::size_t MlaDecode::workspace_bytes(const MlaDecodeOptions& options, const DeviceHandle& device) {
  return kernels_for(settled(options), *device.device_)->workspace_bytes();
}
int MlaDecode::fixed_split(MlaDecodeOptions options, std::size_t bytes, const DeviceHandle& device) {
  settle(options);
  return hypermla::fixed_split(options, bytes, [&](const MlaDecodeOptions& with) {
    return kernels_for(with, *device.device_)->workspace_bytes();
  });
}
std::size_t MlaDecode::workspace_bytes() const { return state_->kernels->workspace_bytes(); }

void MlaDecode::plan(const int* lengths, const int* query_starts, int requests, void* stream, const int* block_table,
                     std::int64_t table_stride) {
  if (requests < 0 || requests > state_->options.max_requests)
    fail("{} requests are not supported: this MlaDecode is for 0 to max_requests={}", requests,
         state_->options.max_requests);
  if (!lengths && requests > 0 && !state_->options.sparse)
    fail("lengths is missing: give the address of the requests' numbers of tokens");
  require_aligned("lengths", lengths, 4);
  require_aligned("query_starts", query_starts, 4);
  if (state_->options.shared_prefixes && requests > 0 && (!block_table || table_stride < 1))
    fail("block_table is missing: with shared_prefixes plan() takes the table of the step, too, and its stride");
  if (!state_->options.shared_prefixes && block_table)
    fail("block_table has no meaning in plan() without shared_prefixes; give it to run() alone");
  state_->kernels->plan(lengths, query_starts, requests, block_table, table_stride, stream);
  const MlaDecodeOptions& at = state_->options;
  if (!query_starts)
    state_->queries = std::min<std::int64_t>(std::int64_t{requests} * at.max_queries, at.max_query_tokens);
  else
    state_->queries = state_->device->is_gpu() ? 0 : std::max(query_starts[requests], 0);
}

void MlaDecode::run(const MlaDecodeTensors& tensors, void* stream) {
  if (tensors.query_tokens == 0) return;
  if (state_->queries < 0) fail("run() needs a plan; call plan() first, once per step");
  if (tensors.query_tokens < state_->queries)
    fail("query_tokens is {}, but the plan has {} queries; give tensors with a row for each", tensors.query_tokens,
         state_->queries);
  state_->kernels->run(tensors, stream);
}

void MlaDecode::check() const {
  const int status = state_->kernels->status();
  if (status & kWrongTokens)
    fail(
        "the last plan had a request of less than 0 or more than max_tokens={} tokens, which was cut to that; make the "
        "MlaDecode for more",
        state_->options.max_tokens);
  if (status & kWrongQueries)
    fail(
        "the last plan had query_starts that fall, or more than max_queries={} queries of a request or "
        "max_query_tokens={} in all; those requests were left out, wholly or in part, and where query_starts fall "
        "others may have been, too",
        state_->options.max_queries, state_->options.max_query_tokens);
}

std::string MlaDecode::explain() const { return state_->kernels->explain(); }

}  // namespace hypermla
