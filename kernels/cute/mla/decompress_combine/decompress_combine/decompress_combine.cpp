#include "decompress_combine.h"

#include <algorithm>

#include "hypermla/plan/registry.h"
#include "mla/combine/combine_plan.h"

namespace hypermla::cute {
namespace {

class DecompressCombinePlan : public AttentionPlan<CombineProblem, DecompressCombineTiling> {
 public:
  void validate() const override {
    const CombineProblem& at = problem;
    validate_combine(at);
    if (at.d != 128 || (at.latent_parts > 0 && at.k != 512))
      fail(
          "--d={} --k={} is not supported: this kernel is made for 512 latent and 128 output columns; the cutile "
          "kernel takes others (--language=cutile)",
          at.d, at.k);
    constexpr std::int64_t kMost = 1 << 28;
    const std::int64_t parts = std::max(at.latent_parts, at.decompressed_parts);
    if (std::int64_t{at.h} * at.s > kMost || parts * at.b > kMost)
      fail("--b={} --h={} --s={} is not supported: h * s and b times the parts of a kind must be at most {}", at.b,
           at.h, at.s, kMost);
    require_positive("blocks", tiling.blocks);
  }

  void use_default_tiling() override { tiling = candidates().front(); }
  // results/nvidia-h200/cute-decompress_combine-b32-s32.json: 60.9 us for 217 MB. Its launch is counted with the parts.
  std::vector<Figures> figures() const override {
    return {{.burst = 0.88, .sustained = 0.88, .memory = 0.80, .launches = {0, 0, 0}}};
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    CuteKernelSpec<CombineProblem, DecompressCombineTiling> spec;
    spec.name = "decompress_combine";
    spec.header = beside(__FILE__, "decompress_combine.cuh");
    // How many parts there are, it learns at run time; none, one and several are three kernels.
    spec.problem = {.b = 0,
                    .s = 0,
                    .h = 0,
                    .d = problem.d,
                    .k = 512,
                    .dtype = problem.dtype,
                    .latent_parts = std::min(problem.latent_parts, 2),
                    .decompressed_parts = 0,
                    .tokens_first = false};
    spec.tiling = tiling;
    spec.candidates = candidates();
    spec.cost = combine_cost(problem);
    spec.at_compile_time = [](DecompressCombineTiling tiling) { return DecompressCombineTiling{.keep = tiling.keep}; };
    // Padded rows are computed too.
    spec.executed = [at = problem, cost = spec.cost](const DecompressCombineTiling&) {
      const Tile tile(at);
      return Cost{cost.flops * tile.count * kDecompressCombineRows / (double(at.b) * at.s), cost.bytes};
    };
    spec.launch = [at = problem, tensors](const DecompressCombineTiling& tiling) {
      const Tile tile(at);
      const int blocks = std::min(tiling.blocks, tile.count);
      KernelLaunch launch;
      launch.grid = {unsigned(blocks) * unsigned(at.h), 1, 1};
      launch.shape = {kDecompressCombineThreads, kDecompressCombineSharedBytes, 1, true};
      launch.arguments = [at, tensors, tile, blocks](void*) {
        auto data = [&](const char* name, int parts) { return parts ? tensors.at(name).data : nullptr; };
        const int M = at.latent_parts, R = at.decompressed_parts;
        const std::int64_t out_row = 2 * at.d * (at.tokens_first ? at.h : 1), heads = at.h;
        const int head_groups = at.d / 64 * (at.tokens_first ? 1 : at.s);
        return Arguments(DecompressCombineArguments{
            .latent_map = rows_map(at, tile, data("o_latent", M), at.k, M),
            .decompressed_map = rows_map(at, tile, data("o_new", R), at.d, R),
            .w_map = M ? make_matrix_map(at.dtype, data("w", M), at.k, at.d, at.h, 64, at.d / 64) : TensorMap{},
            .o_map = make_tensor_map(
                at.dtype, tensors.at("o").data,
                {{at.s, out_row, tile.Bs}, {heads * head_groups, 128, 1}, {at.b, 2 * heads * at.s * at.d, tile.Bb}}),
            .lse_latent = static_cast<const float*>(data("lse_latent", M)),
            .lse_decompressed = static_cast<const float*>(data("lse_new", R)),
            .lse = static_cast<float*>(tensors.at("lse").data),
            .rows = {.b = at.b,
                     .h = at.h,
                     .s = at.s,
                     .Bs = tile.Bs,
                     .Bb = tile.Bb,
                     .query_tiles = tile.per_requests,
                     .tiles = tile.count,
                     .latent_parts = M,
                     .decompressed_parts = R,
                     .head_groups = head_groups},
            .blocks = blocks});
      };
      return launch;
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

 private:
  // As many queries of a request as there are, in tiles of equal size if they are many, and then as many requests as
  // fit.
  struct Tile {
    explicit Tile(const CombineProblem& at)
        : per_requests(int(ceil_div(at.s, kDecompressCombineRows))),
          Bs(int(ceil_div(at.s, per_requests))),
          Bb(std::min(kDecompressCombineRows / Bs, at.b)),
          count(per_requests * int(ceil_div(at.b, Bb))) {}
    int per_requests;  // tiles of the queries of Bb requests
    int Bs, Bb;        // queries, requests
    int count;         // tiles of a head
  };

  // A tensor [parts, B, H, S, width] as (64 columns, query, 64 columns of a query of a head, request of a part).
  static TensorMap rows_map(const CombineProblem& at, const Tile& tile, const void* data, int width, int parts) {
    if (!parts) return {};
    const std::int64_t row = 2 * width, groups = std::int64_t{at.h} * at.s * (width / 64);
    return make_tensor_map(
        at.dtype, data,
        {{at.s, row, tile.Bs}, {groups, 128, 1}, {std::int64_t{parts} * at.b, row * at.h * at.s, tile.Bb}});
  }

  // {blocks, keep}: one thread block per multiprocessor. Outputs that L2 can hold stay there for the kernel behind this
  // one, if the rows that were read make room for them; more outputs leave in better order without that.
  std::vector<DecompressCombineTiling> candidates() const {
    const int filling = std::max(1, target.processors / std::max(problem.h, 1));
    const bool keep = 2.0 * problem.b * problem.h * problem.s * problem.d > (32 << 20);
    return {{filling, keep}, {filling, !keep}, {2 * filling, keep}};
  }
};

HYPERMLA_REGISTER(DecompressCombinePlan,
                  "latent outputs through the value projection, merged with decompressed ones, for Hopper")

}  // namespace
}  // namespace hypermla::cute
