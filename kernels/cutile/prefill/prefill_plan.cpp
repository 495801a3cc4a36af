#include "cutile/prefill/prefill_plan.h"

#include <bit>
#include <limits>
#include <numbers>

#include "hypermla/base/error.h"
#include "hypermla/base/fields.h"
#include "hypermla/plan/status.h"
#include "hypermla/plan/typed_plan.h"

namespace hypermla {
namespace {

class PortablePrefill : public PrefillKernels {
 public:
  PortablePrefill(const MlaPrefillOptions& options, const PrefillTiling& tiling) : options_(options), tiling_(tiling) {}

  std::string explain() const override {
    return fmt::format("cutile.mla.flash_attention, portable: tiles of {} queries and {} tokens, each over all tokens",
                       tiling_.Bm, tiling_.Bn);
  }
  // The status, places behind it, and rows behind these.
  std::size_t workspace_bytes() const override {
    return rows_at() + (options_.query_rows ? std::size_t(options_.max_query_tokens) * sizeof(int) : 0);
  }
  std::vector<KernelSource> sources() const override { return {place_source(), attend_source()}; }

  void prepare(Compiler& compiler, Device& device, void* workspace) override {
    device_ = device.shared_from_this();
    std::vector<std::unique_ptr<Function>> functions = load_all(compiler, device, sources());
    place_ = std::move(functions[0]);
    attend_ = std::move(functions[1]);
    device.fill(workspace, 0, workspace_bytes());  // without a plan no request has queries
    status_ = static_cast<int*>(workspace);
    places_ = reinterpret_cast<int*>(static_cast<char*>(workspace) + kPlacesAt);
    rows_ = reinterpret_cast<int*>(static_cast<char*>(workspace) + rows_at());
  }

  void plan(const PrefillStep& step, StreamHandle stream) override {
    PrefillStep with = step;
    if (with.requests == 0) with.query_starts = with.token_starts = with.query_rows = places_;  // not used, but loaded
    place_->launch({1, 1, 1}, place_arguments(with).pointers(), stream);
  }

  void run(const MlaPrefillTensors& given, StreamHandle stream) override {
    require_tensors(options_, given);
    MlaPrefillTensors with = given;
    if (with.tokens == 0) with.k_nope = with.k_rope = with.v = with.q_nope;  // not read, but views need memory
    require_32_bit_stride("q_nope.token_stride", with.q_nope.token_stride);
    require_32_bit_stride("q_rope.token_stride", with.q_rope.token_stride);
    require_32_bit_stride("k_nope.token_stride", with.k_nope.token_stride);
    require_32_bit_stride("k_rope.token_stride", with.k_rope.token_stride);
    require_32_bit_stride("v.token_stride", with.v.token_stride);
    require_32_bit_stride("o_token_stride", with.o_token_stride);
    const unsigned blocks = unsigned(options_.max_query_tokens / tiling_.Bm + options_.max_requests);
    attend_->launch({blocks, unsigned(options_.heads), 1}, attend_arguments(with).pointers(), stream);
  }

  int status() const override { return read_status(*device_, status_); }

 private:
  static constexpr std::size_t kPlacesAt = 256;
  std::size_t rows_at() const { return kPlacesAt + std::size_t{kPlaces} * options_.max_requests * sizeof(int); }

  // In the order of the kernels' parameters.
  Arguments place_arguments(const PrefillStep& step) const {
    return Arguments(step.query_starts, step.token_starts, step.query_rows, step.requests, options_.max_requests,
                     options_.max_query_tokens, options_.max_tokens, places_, rows_, status_);
  }
  Arguments attend_arguments(const MlaPrefillTensors& with) const {
    const MlaPrefillOptions& at = options_;
    return Arguments(
        with.q_nope.data, with.q_rope.data, with.k_nope.data, with.k_rope.data, with.v.data, places_, rows_, with.o,
        with.lse, at.scale * std::numbers::log2e_v<float>, at.lse_base2 ? 1.0f : std::numbers::ln2_v<float>,
        (at.empty_lse_positive ? 1 : -1) * std::numeric_limits<float>::infinity(), at.max_requests, with.query_tokens,
        with.tokens, with.q_nope.token_stride, with.q_nope.head_stride, with.q_rope.token_stride,
        with.q_rope.head_stride, with.k_nope.token_stride, with.k_nope.head_stride, with.k_rope.token_stride,
        with.k_rope.head_stride, with.v.token_stride, with.v.head_stride, with.o_token_stride, with.o_head_stride,
        with.lse_token_stride, with.lse_head_stride);
  }
  KernelSource place_source() const {
    const int most = int(std::bit_ceil(unsigned(std::max(options_.max_requests, 32))));
    return {"place_requests", "cutile/prefill/place_requests.cuh",
            fmt::format("hypermla::place_requests<{}, {}, {}>", most, tiling_.Bm, options_.query_rows),
            place_arguments({}).sizes()};
  }
  KernelSource attend_source() const {
    const PrefillProblem problem{options_.dtype, options_.causal, options_.query_rows};
    return {"attend_requests", "cutile/prefill/attend_requests.cuh",
            fmt::format("hypermla::attend_requests<hypermla::PrefillProblem{}, hypermla::PrefillTiling{}>",
                        fields_initializer(problem), fields_initializer(tiling_)),
            attend_arguments({}).sizes()};
  }

  MlaPrefillOptions options_;
  PrefillTiling tiling_;
  std::shared_ptr<Device> device_;
  int *status_ = nullptr, *places_ = nullptr, *rows_ = nullptr;
  std::unique_ptr<Function> place_, attend_;
};

}  // namespace

std::unique_ptr<PrefillKernels> make_portable_prefill(const MlaPrefillOptions& options, const PrefillTiling& tiling) {
  return std::make_unique<PortablePrefill>(options, tiling);
}

}  // namespace hypermla
