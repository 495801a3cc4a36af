#include "output_decompression.h"

#include <algorithm>

#include "hypermla/plan/registry.h"
#include "mla/attention_time.h"
#include "mla/output_decompression/output_decompression_plan.h"

namespace hypermla::cute {
namespace {

constexpr int kRows = kOutputDecompressionRows;

class OutputDecompressionPlan : public AttentionPlan<OutputDecompressionProblem, OutputDecompressionTiling> {
 public:
  void validate() const override {
    require_positive("b", problem.b);
    require_positive("s", problem.s);
    require_positive("h", problem.h);
    if (problem.h > 65535) fail("--h={} is not supported: it must be at most 65535", problem.h);
    if (problem.d != 64 && problem.d != 128)
      fail("--d={} is not supported: choose 64 or 128; the cutile kernel takes others (--language=cutile)", problem.d);
    if (problem.k < 64 || problem.k > 512 || problem.k % 64)
      fail(
          "--k={} is not supported: it must be a multiple of 64, from 64 to 512; the cutile kernel takes others "
          "(--language=cutile)",
          problem.k);
    require_half_precision(problem.dtype);
    require_power_of_two("Bs", tiling.Bs, 1, kRows);
    require_positive("blocks", tiling.blocks);
    if (tiling.stages < 2 || tiling.stages > 10)
      fail("--stages={} is not supported: it must be from 2 to 10, as many as shared memory holds", tiling.stages);
  }
  void use_default_tiling() override { tiling = candidates().front(); }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    const OutputDecompressionProblem at = problem;
    CuteKernelSpec<OutputDecompressionProblem, OutputDecompressionTiling> spec;
    spec.name = "output_decompression";
    spec.header = beside(__FILE__, "output_decompression.cuh");
    spec.problem = {.b = 0, .s = 0, .h = 0, .d = at.d, .k = at.k, .dtype = at.dtype};
    spec.tiling = tiling;
    spec.candidates = candidates();
    spec.cost = output_decompression_cost(at);
    // The kernel learns the shape of its boxes from its arguments: one binary serves every number of queries.
    spec.at_compile_time = [](OutputDecompressionTiling tiling) {
      return OutputDecompressionTiling{.Bs = 0, .blocks = 0, .stages = tiling.stages};
    };
    spec.launch = [at, tensors](const OutputDecompressionTiling& tiling) {
      const int query_tiles = int(ceil_div(at.s, tiling.Bs)),
                tiles = query_tiles * int(ceil_div(at.b, kRows / tiling.Bs));
      KernelLaunch launch;
      launch.grid = {unsigned(std::min(tiling.blocks, tiles)), unsigned(at.h), 1};
      launch.shape = {160, output_decompression_shared_bytes(at.k, at.d, tiling.stages)};
      launch.arguments = [=](void*) {
        return Arguments(OutputDecompressionArguments{
            .o_latent_map = rows_map(at, tiling.Bs, tensors.at("o_latent").data, at.k, 1),
            .w_map = make_matrix_map(at.dtype, tensors.at("w").data, at.k, at.d, at.h, 64, at.d / 64),
            .o_map = rows_map(at, tiling.Bs, tensors.at("o").data, at.d, at.d / 64),
            .tiles = tiles,
            .query_tiles = query_tiles,
            .Bs = tiling.Bs});
      };
      return launch;
    };
    // Padded rows are computed too.
    spec.executed = [at, cost = spec.cost](const OutputDecompressionTiling& tiling) {
      return Cost{cost.flops * padding(at.b, kRows / tiling.Bs) * padding(at.s, tiling.Bs), cost.bytes};
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

  // As decompress_combine: results/nvidia-h200/cute-decompress_combine-b32-s32.json.
  std::vector<Figures> figures() const override {
    return {{.burst = 0.88, .sustained = 0.88, .memory = 0.80, .launches = {0, 0, 0}}};
  }
  TimeEstimate time(const Ceilings& ceilings) const override {
    return output_decompression_time(problem, figures(), ceilings);
  }

 private:
  // A tensor [B,H,S,width] as (column, query, batch element, 64 columns, head), in boxes of a tile's rows: 64 columns
  // of Bs queries of 64 / Bs batch elements, `groups` times.
  static TensorMap rows_map(const OutputDecompressionProblem& at, int Bs, const void* data, int width, int groups) {
    const std::int64_t row = 2 * width, head = row * at.s;
    return make_tensor_map(
        at.dtype, data, {{at.s, row, Bs}, {at.b, head * at.h, kRows / Bs}, {width / 64, 128, groups}, {at.h, head, 1}});
  }

  // {Bs, blocks, stages}: the best first guess leads, the tuner measures the others. A tile covers as many queries of a
  // batch element as there are, and fills up with batch elements.
  std::vector<OutputDecompressionTiling> candidates() const {
    const int Bs = std::min(int(std::bit_ceil(unsigned(std::max(problem.s, 1)))), kRows);
    const int filling = std::max(1, target.processors / std::max(problem.h, 1));  // one block per processor
    return {{Bs, filling, 8}, {Bs, filling, 10}, {Bs, 2 * filling, 8}};
  }
};

HYPERMLA_REGISTER(OutputDecompressionPlan,
                  "latent outputs times the value projection of their head, with CUTLASS for Hopper")

}  // namespace
}  // namespace hypermla::cute
