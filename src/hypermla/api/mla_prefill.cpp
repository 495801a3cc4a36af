#include "hypermla/mla_prefill.h"

#include "hypermla/api/shared.h"
#include "hypermla/plan/prefill.h"
#include "hypermla/plan/registry.h"
#include "hypermla/plan/typed_plan.h"

namespace hypermla {
namespace {

std::unique_ptr<PrefillKernels> attention_for(const MlaPrefillOptions& options, const Device& device) {
  if (!device.is_gpu()) return make_prefill_reference(options);
  const Target target = Target::of(device.info());
  // By language: cute comes before cutile, which runs on all.
  for (const KernelEntry& entry : Registry::instance().all()) {
    if (!entry.runs_on(target.arch) || entry.draft) continue;
    const std::unique_ptr<KernelPlan> plan = entry.make();
    plan->target = target;
    if (std::unique_ptr<PrefillKernels> kernels = plan->prefill(options)) return kernels;
  }
  fail("there are no prefill kernels for {} ({}); take a CPU, or a GPU that `hypermla --list` has kernels for",
       device.info().name, target.arch);
}

std::unique_ptr<PrefillKernels> kernels_for(MlaPrefillOptions& options, const Device& device) {
  settle(options);
  std::unique_ptr<PrefillKernels> attention = attention_for(options, device);
  return options.accumulate ? accumulating(std::move(attention), options) : std::move(attention);
}

}  // namespace

struct MlaPrefill::State {
  MlaPrefillOptions options;
  std::shared_ptr<Device> device;
  std::unique_ptr<PrefillKernels> kernels;
  Buffer workspace;
  bool planned = false;
};

MlaPrefill::MlaPrefill(const MlaPrefillOptions& options, const DeviceHandle& device, void* workspace)
    : state_(std::make_unique<State>()) {
  state_->options = options;
  state_->device = device.device_;
  state_->kernels = kernels_for(state_->options, *state_->device);
  workspace = workspace_or_own(workspace, state_->kernels->workspace_bytes(), state_->device, state_->workspace);
  state_->kernels->prepare(shared().compiler, *state_->device, workspace);
}
MlaPrefill::~MlaPrefill() = default;
MlaPrefill::MlaPrefill(MlaPrefill&&) noexcept = default;
MlaPrefill& MlaPrefill::operator=(MlaPrefill&&) noexcept = default;

std::size_t MlaPrefill::workspace_bytes(const MlaPrefillOptions& options, const DeviceHandle& device) {
  MlaPrefillOptions settled = options;
  return kernels_for(settled, *device.device_)->workspace_bytes();
}
std::size_t MlaPrefill::workspace_bytes() const { return state_->kernels->workspace_bytes(); }

void MlaPrefill::plan(const int* query_starts, const int* token_starts, int requests, void* stream) {
  plan(query_starts, token_starts, requests, nullptr, stream);
}

void MlaPrefill::plan(const int* query_starts, const int* token_starts, int requests, const int* query_rows,
                      void* stream) {
  if (requests < 0 || requests > state_->options.max_requests)
    fail("{} requests are not supported: this MlaPrefill is for 0 to max_requests={}", requests,
         state_->options.max_requests);
  if (requests > 0 && (!query_starts || !token_starts))
    fail("{} is missing: give the address of requests + 1 integers", query_starts ? "token_starts" : "query_starts");
  if (query_rows && !state_->options.query_rows)
    fail("query_rows is given, but this MlaPrefill was made without the option query_rows; set it, or leave them out");
  if (!query_rows && state_->options.query_rows && requests > 0)
    fail("query_rows is missing: with the option of that name plan() is given the row of each query");
  require_aligned("query_rows", query_rows, 4);
  require_aligned("query_starts", query_starts, 4);
  require_aligned("token_starts", token_starts, 4);
  state_->kernels->plan({query_starts, token_starts, query_rows, requests}, stream);
  state_->planned = true;
}

void MlaPrefill::run(const MlaPrefillTensors& tensors, void* stream) {
  if (tensors.query_tokens == 0) return;
  if (!state_->planned) fail("run() needs a plan; call plan() first, once per step");
  state_->kernels->run(tensors, stream);
}

void MlaPrefill::check() const {
  const int status = state_->kernels->status();
  if (status & kWrongTokenStarts)
    fail(
        "the last plan had token_starts that fall, are negative, or give a request more than max_tokens={} tokens, "
        "which was cut to that; make the MlaPrefill for more",
        state_->options.max_tokens);
  if (status & kWrongQueryStarts)
    fail(
        "the last plan had query_starts that fall, or these or query_rows that are negative or go beyond "
        "max_query_tokens={}; those requests were left out, and where query_starts fall others may have been, too",
        state_->options.max_query_tokens);
}

std::string MlaPrefill::explain() const { return state_->kernels->explain(); }

}  // namespace hypermla
