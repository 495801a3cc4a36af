#include "cute/latent/prefix_plan.h"

#include <algorithm>
#include <limits>
#include <numbers>

#include "hypermla/base/error.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

// In token blocks against one row tile, about 1.4 us (work_plan.h); by the model, not yet fitted. The shortest prefix
// is 512 tokens. A row tile of a group costs the begin and end of an item, a part, and a merge of 64 rows, which moves
// as many bytes as three blocks. A step pays for the begin and end of one more attention, for which every worker waits.
constexpr int kLeastBlocks = 8, kTileCost = 6, kStepCost = 4;

KernelSource small_kernel(const std::string& name, std::size_t bytes, const std::string& dtypes = "") {
  return {name, "cute/latent/" + name + ".cuh", "hypermla::cute::" + name + dtypes, {int(bytes)}};
}

class SharedPrefixDecode : public DecodeKernels {
 public:
  SharedPrefixDecode(const MlaDecodeOptions& options, std::unique_ptr<LatentDecode> own,
                     std::unique_ptr<LatentDecode> prefixes)
      : options_(options), own_(std::move(own)), prefixes_(std::move(prefixes)) {
    const std::size_t requests = options_.max_requests, groups = requests / 2 + 1;
    const std::size_t queries = options_.max_query_tokens, rows = queries * options_.heads;
    std::size_t end = own_->workspace_bytes();
    const auto take = [&](std::size_t bytes) {
      const std::size_t begin = end;
      end += (bytes + 255) / 256 * 256;
      return begin;
    };
    prefixes_at_ = take(prefixes_->workspace_bytes());
    own_lengths_at_ = take(requests * sizeof(int));
    prefix_blocks_at_ = take(requests * sizeof(int));
    prefix_lengths_at_ = take(groups * sizeof(int));
    prefix_starts_at_ = take(groups * sizeof(int));
    group_at_ = take(groups * sizeof(PrefixGroup));
    places_at_ = take(queries * sizeof(QueryPlace));
    lse_at_ = take(rows * sizeof(float));
    o_at_ = take(rows * 512 * 2);
    workspace_bytes_ = end;
  }

  // The same as without, so that the option changes nothing where requests share nothing.
  double seconds(const DeviceSpec& device, int tokens) const override { return own_->seconds(device, tokens); }
  std::string explain() const override {
    return fmt::format("{}. Shared prefixes: {}. In all a workspace of {:.1f} MB", own_->explain(),
                       prefixes_->explain(), workspace_bytes_ / 1e6);
  }
  std::size_t workspace_bytes() const override { return workspace_bytes_; }
  std::vector<KernelSource> sources() const override {
    std::vector<KernelSource> sources = own_->sources();
    for (KernelSource& source : prefixes_->sources()) sources.push_back(std::move(source));
    for (KernelSource& source : small_kernels()) sources.push_back(std::move(source));
    return sources;
  }

  void prepare(Compiler& compiler, Device& device, void* workspace) override {
    char* const base = static_cast<char*>(workspace);
    const std::string& arch = device.info().arch;
    std::vector<std::shared_future<CacheEntry>> ahead;
    for (const KernelSource& source : sources()) ahead.push_back(compiler.compile_ahead(source, arch));
    own_->prepare(compiler, device, base);
    prefixes_->prepare(compiler, device, base + prefixes_at_);
    const auto load = [&](const KernelSource& source, unsigned threads) {
      return hypermla::load(device, compiler.compile(source, arch), {threads});
    };
    const std::vector<KernelSource> small = small_kernels();
    find_kernel_ = load(small[0], kFindThreads);
    move_kernel_ = load(small[1], 32);
    merge_kernel_ = load(small[2], kMergePrefixThreads);

    const MlaDecodeOptions& at = options_;
    const auto ints = [&](std::size_t at) { return reinterpret_cast<int*>(base + at); };
    const PlanRequestsArguments &of_own = own_->planned(), &of_prefixes = prefixes_->planned();
    find_ = {.own_lengths = ints(own_lengths_at_),
             .prefix_blocks = ints(prefix_blocks_at_),
             .prefix_lengths = ints(prefix_lengths_at_),
             .prefix_starts = ints(prefix_starts_at_),
             .group = reinterpret_cast<PrefixGroup*>(base + group_at_),
             .places = reinterpret_cast<QueryPlace*>(base + places_at_),
             .heads = at.heads,
             .page = at.page,
             .queries = at.max_queries,
             .max_tokens = at.max_tokens,
             .all_queries = at.max_query_tokens,
             .own_rows = of_own.tile_rows,
             .prefix_rows = of_prefixes.tile_rows,
             .least_blocks = kLeastBlocks,
             .tile_cost = kTileCost,
             .least_gain = kStepCost * of_own.workers};
    move_ = {.own = of_own.items,
             .prefixes = of_prefixes.items,
             .prefix_blocks = find_.prefix_blocks,
             .group = find_.group,
             .own_workers = of_own.workers,
             .own_rounds = of_own.rounds,
             .prefix_rounds = of_prefixes.rounds,
             .heads = at.heads};
    constexpr float kInfinity = std::numeric_limits<float>::infinity(), kLog2e = std::numbers::log2e_v<float>;
    merge_ = {.prefix_o = base + o_at_,
              .prefix_lse = reinterpret_cast<float*>(base + lse_at_),
              .places = find_.places,
              .to_log2 = at.lse_base2 ? 1 : kLog2e,
              .from_log2 = at.lse_base2 ? 1 : std::numbers::ln2_v<float>,
              .empty_lse = at.empty_lse_positive ? kInfinity : -kInfinity,
              .heads = at.heads,
              .blocks = (at.heads + kMergePrefixHeads - 1) / kMergePrefixHeads};
    device.fill(base + places_at_, 0xff, lse_at_ - places_at_);  // before the first plan no request shares
  }

  void plan(const int* lengths, const int* query_starts, int requests, const int* block_table,
            std::int64_t table_stride, StreamHandle stream) override {
    find_.lengths = lengths;
    find_.query_starts = query_starts;
    find_.requests = requests;
    find_.groups = requests / 2;
    find_.block_table = block_table;
    find_.table_stride = table_stride;
    launch(*find_kernel_, 1, find_, stream);
    own_->plan(find_.own_lengths, query_starts, requests, nullptr, 0, stream);
    prefixes_->plan(find_.prefix_lengths, find_.prefix_starts, find_.groups, nullptr, 0, stream);
    launch(*move_kernel_, unsigned(own_->planned().workers + prefixes_->planned().workers), move_, stream);
  }

  void run(const MlaDecodeTensors& with, StreamHandle stream) override {
    if (with != last_) {
      last_ = {};
      require_tensors(options_, with);
      of_prefixes_ = with;
      of_prefixes_.o = const_cast<void*>(merge_.prefix_o);
      of_prefixes_.o_token_stride = std::int64_t{options_.heads} * 512;
      of_prefixes_.o_head_stride = 512;
      of_prefixes_.lse = const_cast<float*>(merge_.prefix_lse);
      of_prefixes_.lse_token_stride = options_.heads;
      of_prefixes_.lse_head_stride = 1;
      of_prefixes_.lse_request_stride = 0;
      merge_.o = with.o;
      merge_.o_token_stride = with.o_token_stride;
      merge_.o_head_stride = with.o_head_stride;
      merge_.lse = with.lse;
      merge_.lse_token_stride = with.lse_token_stride;
      merge_.lse_head_stride = with.lse_head_stride;
      merge_.lse_request_stride = with.lse_request_stride;
      last_ = with;
    }
    prefixes_->run(of_prefixes_, stream);
    own_->run(with, stream);
    const int queries = std::min(with.query_tokens, options_.max_query_tokens);
    launch(*merge_kernel_, unsigned(queries) * unsigned(merge_.blocks), merge_, stream);
  }

  int status() const override { return own_->status(); }

 private:
  std::vector<KernelSource> small_kernels() const {
    return {small_kernel("find_prefixes", sizeof find_), small_kernel("move_items", sizeof move_),
            small_kernel("merge_prefixes", sizeof merge_,
                         fmt::format("<hypermla::DType::{}>", dtype_name(options_.dtype)))};
  }
  template <class Arguments>
  static void launch(Function& kernel, unsigned blocks, Arguments& arguments, StreamHandle stream) {
    void* pointers[] = {&arguments};
    kernel.launch({blocks, 1, 1}, pointers, stream);
  }

  MlaDecodeOptions options_;
  std::unique_ptr<LatentDecode> own_, prefixes_;
  std::size_t prefixes_at_, own_lengths_at_, prefix_blocks_at_, prefix_lengths_at_, prefix_starts_at_, group_at_,
      places_at_, lse_at_, o_at_, workspace_bytes_;  // bytes; what own_ has is first
  std::unique_ptr<Function> find_kernel_, move_kernel_, merge_kernel_;
  FindPrefixesArguments find_;
  MoveItemsArguments move_;
  MergePrefixesArguments merge_;
  MlaDecodeTensors last_, of_prefixes_;  // what merge_ and of_prefixes_ were made from
};

}  // namespace

MlaDecodeOptions options_of_prefixes(const MlaDecodeOptions& at) {
  return {.heads = at.heads,
          .max_requests = std::max(at.max_requests / 2, 1),
          .max_queries = at.max_query_tokens,
          .max_query_tokens = at.max_query_tokens,
          .max_tokens = at.max_tokens,
          .page = at.page,
          .dtype = at.dtype,
          .causal = false,
          .scale = at.scale,
          .lse_base2 = true};
}

std::unique_ptr<DecodeKernels> with_shared_prefixes(const MlaDecodeOptions& options, std::unique_ptr<LatentDecode> own,
                                                    const Target& target) {
  // All queries of a group are many rows: the version with the highest tiles.
  const std::unique_ptr<KernelPlan> plan = Registry::instance().find("cute.mla.flash_mla", "v0").make();
  plan->target = target;
  std::unique_ptr<DecodeKernels> prefixes = plan->decode(options_of_prefixes(options));
  auto* const latent = dynamic_cast<LatentDecode*>(prefixes.get());
  if (!latent) fail("cute.mla.flash_mla v0 does not take prefixes; this is a bug, report it");
  prefixes.release();
  return std::make_unique<SharedPrefixDecode>(options, std::move(own), std::unique_ptr<LatentDecode>(latent));
}

}  // namespace hypermla::cute
