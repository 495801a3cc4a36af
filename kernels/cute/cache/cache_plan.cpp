#include "cute/cache/cache_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "cutile/cache/decompress_plan.h"
#include "hypermla/base/fields.h"
#include "hypermla/device/architecture.h"
#include "hypermla/device/tensor_map.h"
#include "hypermla/plan/executable.h"

namespace hypermla {
namespace cute {
namespace {

CacheLayout layout_of(const MlaCache& cache) {
  return {cache.latent,
          cache.rope,
          cache.latent_page_stride,
          cache.latent_token_stride,
          cache.rope_page_stride,
          cache.rope_token_stride,
          unsigned(cache.pages),
          unsigned(cache.page)};
}

// A block of decompress_prefix takes so long for its tokens, against its time for one head.
constexpr double kTimeOfTokens = 0.4;

// Into how many parts the heads are divided, so that the blocks fill the multiprocessors evenly.
int parts_of_heads(int tiles, int heads, int processors) {
  int best = 1;
  double least = INFINITY;
  for (int parts = 1; parts <= heads; ++parts) {
    const double time =
        std::ceil(double(tiles) * parts / processors) * (std::ceil(double(heads) / parts) + kTimeOfTokens);
    if (time < least) best = parts, least = time;
  }
  return best;
}

}  // namespace

MergeStatesArguments arguments_of(const MlaCacheOps::Merge& with) {
  const auto rows = [](const auto& of) {
    return MergeStatesArguments::Rows{const_cast<void*>(static_cast<const void*>(of.data)), of.token_stride,
                                      of.head_stride};
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kLn2 = std::numbers::ln2_v<float>;
  return {.o_a = rows(with.a.o),
          .o_b = rows(with.b.o),
          .o = rows(with.o),
          .lse_a = rows(with.a.lse),
          .lse_b = rows(with.b.lse),
          .lse = rows(with.lse),
          .rows = unsigned(with.tokens) * unsigned(with.heads),
          .heads = unsigned(with.heads),
          .vectors = unsigned(with.width / 8),
          .to_log2 = with.lse_base2 ? 1 : std::numbers::log2e_v<float>,
          .from_log2 = with.lse_base2 ? 1 : kLn2,
          .empty_lse = with.empty_lse_positive ? kInfinity : -kInfinity};
}
unsigned blocks_of(const MergeStatesArguments& of) {
  return (of.rows - 1) / (kMergeTurns * (kCopyThreads / of.vectors)) + 1;
}

AppendArguments arguments_of(const MlaCacheOps::Append& with) {
  static_assert(sizeof(long long) == sizeof *with.slots);
  return {.latent = with.latent,
          .rope = with.rope,
          .latent_stride = with.latent_stride,
          .rope_stride = with.rope_stride,
          .slots = reinterpret_cast<const long long*>(with.slots),
          .cache = layout_of(with.cache),
          .tokens = unsigned(with.tokens),
          .scale = with.cache_scale};
}
unsigned blocks_of(const AppendArguments& of) { return (of.tokens * kRowVectors - 1) / kCopyThreads + 1; }
unsigned fp8_blocks_of(const AppendArguments& of) { return (of.tokens - 1) / (kCopyThreads / 32) + 1; }
unsigned fp8_576_blocks_of(const AppendArguments& of) { return (of.tokens * kFp8RowVectors - 1) / kCopyThreads + 1; }

SplitArguments arguments_of(const MlaCacheOps::Split& with) {
  static_assert(sizeof(KeptPrefix) == sizeof(MlaCacheOps::Prefix) && kMostPrefixes == MlaCacheOps::kMaxPrefixes);
  return {.block_table = with.block_table,
          .table_stride = with.table_stride,
          .lengths = with.lengths,
          .query_starts = with.query_starts,
          .slots = reinterpret_cast<const long long*>(with.slots),
          .prefixes = reinterpret_cast<KeptPrefix*>(with.prefixes),
          .prefix_pages = with.prefix_pages,
          .prefix_pages_stride = with.prefix_pages_stride,
          .owners = with.owners,
          .found = with.found,
          .own_table = with.own_table,
          .own_table_stride = with.own_table_stride,
          .own_lengths = with.own_lengths,
          .shared_query_starts = with.shared_query_starts,
          .shared_token_starts = with.shared_token_starts,
          .query_rows = with.query_rows,
          .width = with.width,
          .requests = with.requests,
          .tokens = with.tokens,
          .page = with.page,
          .count = with.count,
          .cache_pages = int(with.cache_pages)};
}
unsigned match_blocks_of(const SplitArguments& of) {
  constexpr int kSlots = 4 * kMatchThreads;  // of a block, where there are not too many
  return unsigned(std::clamp(std::max((of.requests - 1) / kMatchRequests, (of.tokens - 1) / kSlots) + 1, 1, 512));
}
unsigned split_blocks_of(const SplitArguments& of) {
  return 1 + unsigned(of.requests + kSplitRequests - 1) / kSplitRequests;
}

namespace {

// How far it is in memory from a latent column to the next, and from a column of the head.
struct WeightStrides {
  std::int64_t latent, column;
};
WeightStrides strides_of(const MlaCacheOps::Decompress& with, int product) {
  return product ? WeightStrides{with.w_uv.row_stride, with.w_uv.column_stride}
                 : WeightStrides{with.w_uk.column_stride, with.w_uk.row_stride};
}

}  // namespace

DecompressPrefixArguments arguments_of(const MlaCacheOps::Decompress& with, int processors) {
  const auto rows = [](const MlaRows<void>& of) {
    return DecompressPrefixArguments::Rows{static_cast<unsigned short*>(of.data), of.token_stride, of.head_stride};
  };
  const int tiles = (with.tokens + kPrefixTokens - 1) / kPrefixTokens;
  return {.weights = {},
          .latent_innermost = {strides_of(with, 0).latent == 1, strides_of(with, 1).latent == 1},
          .cache = layout_of(with.cache),
          .block_table = with.block_table,
          .out = {rows(with.k), rows(with.v)},
          .k_rope = rows(with.k_rope),
          .tokens = with.tokens,
          .heads = with.heads,
          .tiles = tiles,
          .parts = parts_of_heads(tiles, with.heads, processors)};
}
unsigned blocks_of(const DecompressPrefixArguments& of) { return unsigned(of.tiles) * unsigned(of.parts); }

TensorMapShape weights_shape(const MlaCacheOps::Decompress& with, int product) {
  const WeightStrides strides = strides_of(with, product);
  const std::int64_t batch_bytes = 2 * (product ? with.w_uv : with.w_uk).head_stride;
  if (strides.latent == 1)
    return {.rows = 128,
            .groups = 512 / 64,
            .batch = with.heads,
            .row_bytes = 2 * strides.column,
            .batch_bytes = batch_bytes,
            .box_rows = 128,
            .box_groups = 1};
  return {.rows = 512,
          .groups = 128 / 64,
          .batch = with.heads,
          .row_bytes = 2 * strides.latent,
          .batch_bytes = batch_bytes,
          .box_rows = 64,
          .box_groups = 2};
}

namespace {

// In CUDA C++; decompress_prefix for Hopper only.
std::vector<KernelSource> own_sources(DType dtype, const std::string& arch) {
  const auto source = [&](const std::string& name, bool of_dtype, std::size_t bytes) {
    const std::string dtypes = of_dtype ? fmt::format("<hypermla::DType::{}>", dtype_name(dtype)) : "";
    return KernelSource{name, "cute/cache/" + name + ".cuh", "hypermla::cute::" + name + dtypes, {int(bytes)}};
  };
  std::vector<KernelSource> sources = {source("merge_states", true, sizeof(MergeStatesArguments)),
                                       source("append", false, sizeof(AppendArguments)),
                                       source("append_fp8", true, sizeof(AppendArguments)),
                                       source("append_fp8_576", true, sizeof(AppendArguments)),
                                       source("match_prefixes", false, sizeof(SplitArguments)),
                                       source("split_requests", false, sizeof(SplitArguments))};
  if (architecture(arch).runs_cute)
    sources.push_back(source("decompress_prefix", true, sizeof(DecompressPrefixArguments)));
  return sources;
}

class CacheOps : public CacheKernels {
 public:
  CacheOps(DType dtype, Compiler& compiler, Device& device) : dtype_(dtype), processors_(device.info().processors) {
    const std::string& arch = device.info().arch;
    functions_ = load_all(compiler, device, own_sources(dtype, arch),
                          {{kCopyThreads},
                           {kCopyThreads},
                           {kCopyThreads},
                           {kCopyThreads},
                           {kMatchThreads},
                           {kSplitThreads},
                           {kPrefixThreads, kPrefixSharedBytes}});
    if (!architecture(arch).runs_cute) portable_ = std::make_unique<PortableDecompress>(dtype, compiler, device);
  }

  void merge_states(const MlaCacheOps::Merge& with, StreamHandle stream) override {
    MergeStatesArguments arguments = arguments_of(with);
    launch(kMerge, blocks_of(arguments), arguments, stream);
  }

  void append(const MlaCacheOps::Append& with, StreamHandle stream) override {
    AppendArguments arguments = arguments_of(with);
    switch (with.cache.format) {
      case MlaCacheFormat::as_queries:
        return launch(kAppend, blocks_of(arguments), arguments, stream);
      case MlaCacheFormat::fp8_656:
        return launch(kAppendFp8, fp8_blocks_of(arguments), arguments, stream);
      case MlaCacheFormat::fp8_576:
        return launch(kAppendFp8_576, fp8_576_blocks_of(arguments), arguments, stream);
    }
  }

  void decompress_prefix(const MlaCacheOps::Decompress& with, StreamHandle stream) override {
    if (portable_) return portable_->run(with, stream);
    DecompressPrefixArguments arguments = arguments_of(with, processors_);
    for (const int product : {0, 1})
      arguments.weights[product] =
          make_tensor_map(dtype_, (product ? with.w_uv : with.w_uk).data, weights_shape(with, product));
    launch(kDecompress, blocks_of(arguments), arguments, stream);
  }

  void split_prefixes(const MlaCacheOps::Split& with, StreamHandle stream) override {
    SplitArguments arguments = arguments_of(with);
    if (with.count > 0) launch(kMatch, match_blocks_of(arguments), arguments, stream);
    launch(kSplit, split_blocks_of(arguments), arguments, stream);
  }

 private:
  template <class Arguments>
  void launch(int function, unsigned blocks, Arguments& arguments, StreamHandle stream) {
    void* pointers[] = {&arguments};
    functions_[function]->launch({blocks, 1, 1}, pointers, stream);
  }

  DType dtype_;
  int processors_;
  enum { kMerge, kAppend, kAppendFp8, kAppendFp8_576, kMatch, kSplit, kDecompress };  // as own_sources() has them
  std::vector<std::unique_ptr<Function>> functions_;
  std::unique_ptr<PortableDecompress> portable_;  // in place of kDecompress
};

}  // namespace
}  // namespace cute

std::vector<KernelSource> cache_sources(DType dtype, const std::string& arch) {
  std::vector<KernelSource> sources = cute::own_sources(dtype, arch);
  if (!architecture(arch).runs_cute)
    for (KernelSource& source : PortableDecompress::sources(dtype)) sources.push_back(std::move(source));
  return sources;
}

std::unique_ptr<CacheKernels> make_cache_kernels(DType dtype, Compiler& compiler, Device& device) {
  return std::make_unique<cute::CacheOps>(dtype, compiler, device);
}

}  // namespace hypermla
