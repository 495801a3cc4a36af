#include "cutile/decode/decode_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>

#include "cutile/decode/decode.h"
#include "hypermla/base/error.h"
#include "hypermla/base/fields.h"
#include "hypermla/plan/status.h"
#include "hypermla/plan/typed_plan.h"

namespace hypermla {
namespace {

constexpr int kMostParts = 256, kFewParts = 4, kMergedRows = 16;

class PagedDecode : public DecodeKernels {
 public:
  PagedDecode(const MlaDecodeOptions& options, const Target& target,
              std::function<double(const DeviceSpec&, int)> seconds)
      : options_(options), seconds_(std::move(seconds)), tiling_(tiling(target)) {
    const MlaDecodeOptions& at = options_;
    query_tiles_ = int(ceil_div(at.max_queries, tiling_.Bq));
    head_tiles_ = int(ceil_div(at.heads, tiling_.Bh));
    if (at.split) {
      parts_ = int(ceil_div(at.max_tokens, at.split));
    } else {
      // Those by which a full step of usual lengths takes the least time, in steps of blocks: what a part costs beside
      // its tokens is worth two.
      const double units = double(at.max_requests) * query_tiles_ * head_tiles_ * kDecodeLatent / tiling_.Bv;
      const int steps = int(ceil_div(std::min(at.max_tokens, 4096), tiling_.Bn));
      const auto cost = [&](int parts) {
        return std::ceil(units * parts / (target.processors * tiling_.occupancy)) * (ceil_div(steps, parts) + 2);
      };
      for (int parts = 2; parts <= std::min(kMostParts / 4, steps); ++parts)
        if (cost(parts) < cost(parts_)) parts_ = parts;
    }
    if (parts_ > kMostParts)
      fail("split={} is not supported: {} tokens make {} parts, and at most {} are merged; choose a larger split",
           at.split, at.max_tokens, parts_, kMostParts);
    std::size_t end = 0;
    const auto take = [&](std::size_t bytes) {
      const std::size_t begin = end;
      end += (bytes + 255) / 256 * 256;
      return begin;
    };
    take(sizeof(int));
    step_at_ = take(3 * sizeof(int) * at.max_requests);
    request_of_at_ = take(sizeof(int) * at.max_query_tokens);
    const std::size_t rows = std::size_t(parts_) * at.max_query_tokens * at.heads;
    lse_part_at_ = take(rows * sizeof(float));
    o_part_at_ = take(rows * kDecodeLatent * dtype_bytes(at.dtype));
    workspace_bytes_ = end;
  }

  double seconds(const DeviceSpec& device, int tokens) const override { return seconds_(device, tokens); }
  std::size_t workspace_bytes() const override { return workspace_bytes_; }
  std::string explain() const override {
    return fmt::format(
        "cutile.mla.flash_mla_split_kv, portable: {} x {} rows (queries x heads) of a request at once, its tokens in "
        "up "
        "to {} parts, with a workspace of {:.1f} MB",
        tiling_.Bq, tiling_.Bh, parts_, workspace_bytes_ / 1e6);
  }

  std::vector<KernelSource> sources() const override { return {plan_source(), attend_source(), merge_source()}; }

  void prepare(Compiler& compiler, Device& device, void* workspace) override {
    device_ = device.shared_from_this();
    std::vector<std::unique_ptr<Function>> functions = load_all(compiler, device, sources());
    plan_ = std::move(functions[0]);
    attend_ = std::move(functions[1]);
    merge_ = std::move(functions[2]);

    char* const base = static_cast<char*>(workspace);
    device.fill(base, 0, request_of_at_);  // without a plan there is no work
    device.fill(base + request_of_at_, 0xff, sizeof(int) * options_.max_query_tokens);
    status_ = reinterpret_cast<int*>(base);
    step_ = reinterpret_cast<int*>(base + step_at_);
    request_of_ = reinterpret_cast<int*>(base + request_of_at_);
    lse_part_ = reinterpret_cast<float*>(base + lse_part_at_);
    o_part_ = base + o_part_at_;
  }

  void plan(const int* lengths, const int* query_starts, int requests, const int*, std::int64_t,
            StreamHandle stream) override {
    plan_->launch({1, 1, 1}, plan_arguments(lengths, query_starts, requests).pointers(), stream);
  }

  void run(const MlaDecodeTensors& with, StreamHandle stream) override {
    const MlaDecodeOptions& at = options_;
    require_tensors(at, with);
    const std::pair<const char*, std::int64_t> strides[] = {{"q_latent.token_stride", with.q_latent.token_stride},
                                                            {"q_latent.head_stride", with.q_latent.head_stride},
                                                            {"q_rope.token_stride", with.q_rope.token_stride},
                                                            {"q_rope.head_stride", with.q_rope.head_stride},
                                                            {"latent_page_stride", with.latent_page_stride},
                                                            {"latent_token_stride", with.latent_token_stride},
                                                            {"rope_page_stride", with.rope_page_stride},
                                                            {"rope_token_stride", with.rope_token_stride},
                                                            {"o_token_stride", with.o_token_stride},
                                                            {"o_head_stride", with.o_head_stride}};
    for (const auto& [name, stride] : strides) require_32_bit_stride(name, stride);
    if (with.pages * at.page > std::numeric_limits<int>::max())
      fail("pages={} is not supported: the cache has more than 2147483647 tokens", with.pages);
    attend_->launch({unsigned(query_tiles_ * head_tiles_), unsigned(parts_ * kDecodeLatent / tiling_.Bv),
                     unsigned(at.max_requests)},
                    attend_arguments(with).pointers(), stream);
    merge_->launch({unsigned(at.max_query_tokens), ceil_div(at.heads, kMergedRows / merged_at_once()), 1},
                   merge_arguments(with).pointers(), stream);
  }

  int status() const override { return read_status(*device_, status_); }

 private:
  // GPUs with large blocks hold the whole accumulator of 64 rows, fewer than which do not fill their tensor cores: some
  // heads of several queries, or heads that there are not. Others hold less, or make the scores several times. The
  // tokens of a step lie in one page. Stack frames, as compiled: none, but where tokens are gathered up to 56 bytes on
  // sm_80 to sm_89, and 216 on sm_100.
  PagedDecodeTiling tiling(const Target& target) const {
    const int heads = std::clamp(int(std::bit_ceil(unsigned(options_.heads))), 16, 64), page = at_compile_time().page;
    const int Bq = queries_of(64 / heads), tokens = std::min(page, 64);
    if (!target.is_gpu()) return {heads, Bq, page == 1 ? 64 : tokens, 512, 512, 1, 1};
    const Architecture gpu = architecture(target.arch);
    if (page == 1 && gpu.has_large_blocks()) return {64, 1, 64, 256, 64, 8, 1};
    if (page == 1) return {32, 1, 32, gpu.tma ? 128 : 64, 64, 8, 1};
    if (gpu.has_large_blocks()) return {64 / Bq, Bq, tokens, 512, 128, 8, 1};
    if (page == 16) return {64, 1, 16, 128, 64, 8, 1};
    if (gpu.is_small_blackwell()) return {32, 1, 32, 512, 128, 8, 1};
    if (gpu.shared_kb >= 163) return {32, 1, 32, 128, 128, 8, 1};
    return {32, 1, 32, 64, 64, 8, 1};
  }
  // Of few parts one after the other is read, of 16 heads; of many 8 at once, and never of one head: what tileiras 13.5
  // makes of that is wrong (on an H200 where there is more than one token).
  int merged_at_once() const { return parts_ > kFewParts ? 8 : 1; }
  int queries_of(int most) const { return std::clamp(int(std::bit_ceil(unsigned(options_.max_queries))), 1, most); }
  // Where tokens are chosen one by one, and where pages have one each, the kernel gathers.
  PagedDecodeProblem at_compile_time() const {
    return {.dtype = options_.dtype, .causal = options_.causal, .page = options_.sparse ? 1 : options_.page};
  }
  std::string header(const char* name) const { return fmt::format("cutile/decode/{}.cuh", name); }
  // In the order of the kernels' parameters.
  Arguments plan_arguments(const int* lengths, const int* query_starts, int requests) const {
    const MlaDecodeOptions& at = options_;
    return Arguments(lengths, query_starts, int(lengths != nullptr), int(query_starts != nullptr), requests,
                     at.max_requests, at.max_queries, at.max_query_tokens, at.max_tokens, step_, request_of_, status_);
  }
  Arguments attend_arguments(const MlaDecodeTensors& with) const {
    const MlaDecodeOptions& at = options_;
    // Tokens that are addressed by themselves are pages of one.
    const std::int64_t split_into = at.sparse || at.page == 1 ? at.page : 1;
    return Arguments(with.q_latent.data, with.q_rope.data, with.cache_latent, with.cache_rope, with.block_table, step_,
                     o_part_, lse_part_, at.scale * std::numbers::log2e_v<float>, at.heads, at.max_requests, parts_,
                     at.split, int(with.pages * at.page), with.q_latent.token_stride, with.q_latent.head_stride,
                     with.q_rope.token_stride, with.q_rope.head_stride, with.latent_page_stride / split_into,
                     with.latent_token_stride, with.rope_page_stride / split_into, with.rope_token_stride,
                     with.table_stride);
  }
  Arguments merge_arguments(const MlaDecodeTensors& with) const {
    const MlaDecodeOptions& at = options_;
    return Arguments(o_part_, lse_part_, step_, request_of_, with.sinks, with.o, with.lse, int(with.sinks != nullptr),
                     at.heads, at.max_query_tokens, parts_, at.lse_base2 ? 1.0f : std::numbers::ln2_v<float>,
                     (at.empty_lse_positive ? 1 : -1) * std::numeric_limits<float>::infinity(), with.o_token_stride,
                     with.o_head_stride, with.lse_token_stride, with.lse_head_stride, with.lse_request_stride);
  }
  KernelSource plan_source() const {
    const int most = int(std::bit_ceil(unsigned(std::max(options_.max_requests, 32))));
    return {"plan_step", header("plan_step"), fmt::format("hypermla::plan_step<{}>", most),
            plan_arguments(nullptr, nullptr, 0).sizes()};
  }
  KernelSource attend_source() const {
    return {"attend_pages", header("attend_pages"),
            fmt::format("hypermla::attend_pages<hypermla::PagedDecodeProblem{}, hypermla::PagedDecodeTiling{}>",
                        fields_initializer(at_compile_time()), fields_initializer(tiling_)),
            attend_arguments({}).sizes()};
  }
  KernelSource merge_source() const {
    return {
        "merge_parts", header("merge_parts"),
        fmt::format("hypermla::merge_parts<hypermla::DType::{}, {}, {}, {}>", dtype_name(options_.dtype),
                    merged_at_once() == 1 ? kFewParts : kMostParts, merged_at_once(), kMergedRows / merged_at_once()),
        merge_arguments({}).sizes()};
  }

  MlaDecodeOptions options_;
  std::function<double(const DeviceSpec&, int)> seconds_;
  PagedDecodeTiling tiling_;
  int query_tiles_ = 1, head_tiles_ = 1, parts_ = 1;
  std::size_t step_at_ = 0, request_of_at_ = 0, lse_part_at_ = 0, o_part_at_ = 0, workspace_bytes_ = 0;
  std::shared_ptr<Device> device_;
  int *status_ = nullptr, *step_ = nullptr, *request_of_ = nullptr;
  float* lse_part_ = nullptr;
  void* o_part_ = nullptr;
  std::unique_ptr<Function> plan_, attend_, merge_;
};

}  // namespace

std::unique_ptr<DecodeKernels> make_paged_decode(const MlaDecodeOptions& options, const Target& target,
                                                 std::function<double(const DeviceSpec&, int)> seconds) {
  if (fp8_bytes(options.cache_format) || options.shards > 1 || options.shared_prefixes) return nullptr;
  return std::make_unique<PagedDecode>(options, target, std::move(seconds));
}

}  // namespace hypermla
