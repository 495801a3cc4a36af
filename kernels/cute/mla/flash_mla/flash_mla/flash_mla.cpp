#include "flash_mla.h"

#include "cute/latent/latent_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

constexpr int kRows = 64;  // of a tile
constexpr unsigned kThreads = 384;

class FlashMlaPlan : public LatentPlan<FlashMlaTiling> {
 public:
  void validate() const override {
    LatentPlan::validate();
    validate_prefetch(tiling.prefetch);
  }

 protected:
  Division division(const FlashMlaTiling&) const override { return {.rows = kRows, .costs = {}}; }

  // {evict_first, prefetch}. With few row tiles to read them tokens are used up at once, unless the tiles drift apart over long
  // requests; where the tiles of all requests are few, too, the start of the kernel counts.
  std::vector<FlashMlaTiling> candidates() const override {
    std::vector<FlashMlaTiling> all = {{false, 0}, {true, 0}};
    if (may_prefetch()) all.push_back({true, 2});
    const std::int64_t of_request = row_tiles({}), tiles = of_request * problem.b;
    if (of_request <= 2 && 3 * tiles <= target.processors) std::swap(all.front(), all.back());
    else if (of_request <= (problem.ragged ? 2 : 8)) std::swap(all[0], all[1]);
    return all;
  }

  std::unique_ptr<CuteKernel> attention(const Tensors& tensors) const override {
    CuteKernelSpec<LatentProblem, FlashMlaTiling> spec;
    spec.name = "flash_mla";
    spec.header = beside(__FILE__, "flash_mla.cuh");
    spec.problem = at_compile_time();
    spec.tiling = tiling;
    spec.candidates = candidates();
    spec.cost = latent_cost(problem);
    const auto self = std::make_shared<const FlashMlaPlan>(*this);
    spec.executed = [self](const FlashMlaTiling& at) { return self->executed_cost(at); };
    spec.launch = [self, tensors](const FlashMlaTiling& at) {
      KernelLaunch launch;
      const WorkSizes sizes = self->sizes(at);
      launch.grid = {unsigned(sizes.workers), 1, 1};
      launch.shape = {kThreads, kFlashMlaSharedBytes, 1, true};
      if (!self->problem.ragged) launch.constants = self->item_bytes(at);
      launch.arguments = [self, tensors, rounds = int(sizes.rounds)](void* constants) {
        const LatentProblem& of = self->problem;
        auto data = [&](const char* name) { return tensors.at(name).data; };
        const Operands in = self->operands(tensors);
        const int box = of.page ? std::min(of.page, kTokenBlock) : kTokenBlock;
        return Arguments(self->row_map(in.qc, of.k, kRows, 2), self->row_map(in.qpe, of.p, kRows, 1),
                         self->token_map(in.z, of.k, box, box < kTokenBlock ? 1 : 2), self->token_map(in.kpe, of.p, box, 1),
                         self->row_map(in.o, of.k, kRows, 4), of.ragged ? data("work") : constants, data("lse"),
                         data("o_part"), data("lse_part"), of.page ? data("block_table") : nullptr, in.z.data(),
                         in.kpe.data(), score_scale(of) * kLog2e, self->lse_unit(), of.h * of.s, of.s, rounds,
                         table_width(of), in.z.row_bytes(), in.kpe.row_bytes(),
                         reads_after_lengths(of) ? data("after_lengths") : nullptr, of.after);
      };
      return launch;
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

  std::unique_ptr<CuteKernel> combine(const Tensors& tensors, const CuteKernel& main) const override {
    CuteKernelSpec<CombinePartsProblem, CombinePartsTiling> spec;
    spec.name = "combine_parts";
    spec.header = "cute/latent/combine_parts.cuh";
    spec.candidates = {{0, 0}, {8, 0}, {16, 0}, {32, 0}, {0, 1}, {0, 2}, {0, 4}, {0, 8}};
    auto blocks_of = [processors = target.processors](const CombinePartsTiling& of, const FlashMlaTiling&, std::int64_t tiles,
                                                      unsigned) {
      unsigned blocks = unsigned(of.blocks);
      if (blocks == 0)  // four or more for every multiprocessor
        for (blocks = 8; blocks < 32 && blocks * tiles < 4 * processors;) blocks *= 2;
      return blocks;
    };
    return merging(std::move(spec), tensors, main, blocks_of, [](const FlashMlaTiling&) { return std::tuple(); });
  }

  std::shared_ptr<const LatentPlan> shared_copy() const override { return std::make_shared<const FlashMlaPlan>(*this); }
};

HYPERMLA_REGISTER(FlashMlaPlan, "attention in the latent space, scheduled by hand for Hopper: dense or paged, ragged lengths")

}  // namespace
}  // namespace hypermla::cute
