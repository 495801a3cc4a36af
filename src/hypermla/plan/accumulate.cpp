// MlaPrefillOptions::accumulate: attention into memory of its own, then a merge with what o and lse hold.
#include <bit>
#include <limits>

#include "hypermla/plan/cache_ops.h"
#include "hypermla/plan/prefill.h"

namespace hypermla {
namespace {

constexpr int kValueColumns = 128;

class AccumulatingPrefill : public PrefillKernels {
 public:
  AccumulatingPrefill(std::unique_ptr<PrefillKernels> attention, const MlaPrefillOptions& options)
      : attention_(std::move(attention)), options_(options) {}

  std::string explain() const override { return attention_->explain() + ", merged into what is there"; }
  std::size_t workspace_bytes() const override { return lse_at() + rows() * sizeof(float); }
  std::vector<KernelSource> sources() const override { return attention_->sources(); }
  int status() const override { return attention_->status(); }

  void prepare(Compiler& compiler, Device& device, void* workspace) override {
    device_ = device.shared_from_this();
    merge_ = device.is_gpu() ? make_cache_kernels(options_.dtype, compiler, device)
                             : make_cache_reference(options_.dtype, device);
    o_ = static_cast<char*>(workspace) + o_at();
    lse_ = reinterpret_cast<float*>(static_cast<char*>(workspace) + lse_at());
    attention_->prepare(compiler, device, workspace);
  }

  // Queries that this plan does not have get no attention: their parts are empty until the next plan.
  void plan(const PrefillStep& step, StreamHandle stream) override {
    constexpr float kEmpty = -std::numeric_limits<float>::infinity();
    device_->fill_words(lse_, std::bit_cast<std::uint32_t>(kEmpty), rows(), stream);
    attention_->plan(step, stream);
  }

  void run(const MlaPrefillTensors& with, StreamHandle stream) override {
    require_tensors(options_, with);
    const std::int64_t heads = options_.heads;
    MlaPrefillTensors own = with;
    own.o = o_;
    own.o_token_stride = heads * kValueColumns;
    own.o_head_stride = kValueColumns;
    own.lse = lse_;
    own.lse_token_stride = heads;
    own.lse_head_stride = 1;
    attention_->run(own, stream);
    const MlaRows<void> o = {with.o, with.o_token_stride, with.o_head_stride};
    const MlaRows<float> lse = {with.lse, with.lse_token_stride, with.lse_head_stride};
    merge_->merge_states({.a = {{o.data, o.token_stride, o.head_stride}, {lse.data, lse.token_stride, lse.head_stride}},
                          .b = {{o_, own.o_token_stride, own.o_head_stride}, {lse_, heads, 1}},
                          .o = o,
                          .lse = lse,
                          .tokens = std::min(with.query_tokens, options_.max_query_tokens),
                          .heads = options_.heads,
                          .width = kValueColumns,
                          .lse_base2 = options_.lse_base2,
                          .empty_lse_positive = options_.empty_lse_positive},
                         stream);
  }

 private:
  std::size_t rows() const { return std::size_t(options_.max_query_tokens) * options_.heads; }
  // Bytes of the workspace before the outputs, and before the log-sum-exps.
  std::size_t o_at() const { return (attention_->workspace_bytes() + 255) / 256 * 256; }
  std::size_t lse_at() const { return o_at() + rows() * kValueColumns * 2; }

  std::unique_ptr<PrefillKernels> attention_;
  std::unique_ptr<CacheKernels> merge_;
  MlaPrefillOptions options_;
  std::shared_ptr<Device> device_;
  void* o_ = nullptr;
  float* lse_ = nullptr;
};

}  // namespace

std::unique_ptr<PrefillKernels> accumulating(std::unique_ptr<PrefillKernels> kernels,
                                             const MlaPrefillOptions& options) {
  return std::make_unique<AccumulatingPrefill>(std::move(kernels), options);
}

}  // namespace hypermla
