#include "flash_mla_v1.h"

#include "cute/latent/combine_rows.h"
#include "cute/latent/latent_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

constexpr unsigned kThreads = 384;

class FlashMlaV1Plan : public LatentPlan<FlashMlaV1Tiling> {
 public:
  FlashMlaV1Plan() { problem.h = 16; }
  void validate() const override {
    LatentPlan::validate();
    if (tiling.rows != 16 && tiling.rows != 32) fail("--rows={} is not supported: choose 16 or 32", tiling.rows);
    if (tiling.cluster != 1 && tiling.cluster != 2) fail("--cluster={} is not supported: choose 1 or 2", tiling.cluster);
    validate_prefetch(tiling.prefetch);
  }

 protected:
  // Costs fitted on an H200, in units of a block of tokens against a tile (about 1.1 us).
  Division division(const FlashMlaV1Tiling& at) const override {
    return {.rows = at.rows, .costs = {.item = 2, .combine = 2, .partial = 0.01}};
  }

  // 32 rows cost less per row, 16 rows less at the ends: partial outputs are half as long. So 16 where they are all,
  // and where a multiprocessor has but a few blocks of tokens. Side by side, row tiles share the reads of their tokens.
  std::vector<FlashMlaV1Tiling> candidates() const override {
    const int rows = problem.h * problem.s;
    if (problem.split > 0) return {{rows <= 16 ? 16 : 32, 1, true}};  // the same sums, whatever the batch
    const bool few = rows <= 16 || token_blocks() * ceil_div(rows, 16) <= 8 * target.processors;
    // What other tiles of the request read as well is there soon enough.
    const int prefetch = rows <= 16 && may_prefetch() ? 3 : 0;
    const FlashMlaV1Tiling first{.rows = few ? 16 : 32, .cluster = !few && rows > 32 ? 2 : 1, .prefetch = prefetch};
    std::vector<FlashMlaV1Tiling> all = {first};
    for (const FlashMlaV1Tiling& one :
         {FlashMlaV1Tiling{16, 1, true}, FlashMlaV1Tiling{16, 2, true}, FlashMlaV1Tiling{32, 1, true},
          FlashMlaV1Tiling{32, 2, true}, FlashMlaV1Tiling{32, 2, false}})
      if (fields_json(one) != fields_json(first)) all.push_back(one);
    return all;
  }

  std::unique_ptr<CuteKernel> attention(const Tensors& tensors) const override {
    CuteKernelSpec<LatentProblem, FlashMlaV1Tiling> spec;
    spec.name = "flash_mla_v1";
    spec.header = beside(__FILE__, "flash_mla_v1.cuh");
    spec.problem = at_compile_time();
    spec.problem.ragged = problem.ragged;
    spec.tiling = tiling;
    spec.candidates = candidates();
    // Where its blocks are placed is nothing to the kernel.
    spec.at_compile_time = [](FlashMlaV1Tiling at) {
      at.cluster = 1;
      return at;
    };
    spec.cost = latent_cost(problem);
    const auto self = std::make_shared<const FlashMlaV1Plan>(*this);
    spec.executed = [self](const FlashMlaV1Tiling& at) { return self->executed_cost(at); };
    spec.launch = [self, tensors](const FlashMlaV1Tiling& at) {
      KernelLaunch launch;
      const WorkSizes sizes = self->sizes(at);
      launch.grid = {unsigned(sizes.workers), 1, 1};
      // A place beside each other is all that the blocks of a cluster want of it: of an odd number each has its own.
      launch.shape = {kThreads, flash_mla_v1_shared_bytes(at.rows),
                      unsigned(sizes.workers % at.cluster ? 1 : at.cluster), true};
      if (!self->problem.ragged) launch.constants = self->item_bytes(at);
      launch.arguments = [self, tensors, at, rounds = int(sizes.rounds)](void* constants) {
        const LatentProblem& of = self->problem;
        auto data = [&](const char* name) { return tensors.at(name).data; };
        const Operands in = self->operands(tensors);
        // Pages smaller than a block come box by box; v0 gathers them faster.
        const int box = of.page ? std::min(of.page, kTokenBlock) : kTokenBlock;
        return Arguments(self->row_map(in.qc, of.k, at.rows, 8), self->row_map(in.qpe, of.p, at.rows, 1),
                         self->token_map(in.z, of.k, box, box < kTokenBlock ? 1 : 2), self->token_map(in.kpe, of.p, box, 1),
                         self->row_map(in.o, of.k, at.rows, 4), of.ragged ? data("work") : constants, data("lse"),
                         data("o_part"), data("lse_part"), of.page ? data("block_table") : nullptr,
                         score_scale(of) * kLog2e, self->lse_unit(), of.h * of.s, of.s, rounds, table_width(of),
                         reads_after_lengths(of) ? data("after_lengths") : nullptr, of.after);
      };
      return launch;
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

  std::unique_ptr<CuteKernel> combine(const Tensors& tensors, const CuteKernel& main) const override {
    CuteKernelSpec<CombineRowsProblem, CombineRowsTiling> spec;
    spec.name = "combine_rows";
    spec.header = "cute/latent/combine_rows.cuh";
    spec.candidates = {{0}, {1}, {2}, {4}, {8}};
    auto blocks_of = [processors = target.processors](const CombineRowsTiling&, const FlashMlaV1Tiling& at, std::int64_t tiles,
                                                      unsigned groups) {
      unsigned blocks = unsigned(at.rows / 2);  // in one wave, 1024 threads to a multiprocessor
      while (blocks > 1 && blocks * groups * tiles > 8 * processors) blocks /= 2;
      return blocks;
    };
    return merging(std::move(spec), tensors, main, blocks_of, [](const FlashMlaV1Tiling& at) { return std::tuple(at.rows); });
  }

  std::shared_ptr<const LatentPlan> shared_copy() const override { return std::make_shared<const FlashMlaV1Plan>(*this); }
};

HYPERMLA_REGISTER(FlashMlaV1Plan,
                  "attention in the latent space for few rows: they take the columns of wgmma, 16 or 32 at a time")

}  // namespace
}  // namespace hypermla::cute
