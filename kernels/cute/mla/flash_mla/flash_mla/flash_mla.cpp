#include "flash_mla.h"

#include <limits>

#include "cute/latent/latent_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

class FlashMlaPlan : public LatentPlan<FlashMlaTiling> {
 public:
  void validate() const override {
    LatentPlan::validate();
    validate_prefetch(tiling.prefetch);
    if (tiling.spare && is_gathered(problem.page))
      fail("--spare is not supported here: it needs a dense cache or pages of {} tokens or more; leave it out",
           kLeastBox);
  }
  // results/nvidia-h200/cute-flash_mla-*.json: b32 s2..s64 in 104..2903 us, s16 and s32 sustained 843 and 1680 us;
  // merges of cut tiles from b1 t4096 (10.9 us), b1 t131072 (60.4 us), b32 s1 (62.4 us) and h64 (44.0 us), when a
  // kernel of its own merged.
  std::vector<Figures> figures() const override {
    if (problem.page == 1)  // gathered: results/nvidia-h200/sparse.json, and the log for few queries
      return {{.rows = 64,
               .burst = 1.03,
               .sustained = 1.01,
               .memory = 0.92,
               .launches = {.full = 2.5, .half = 5.2, .few = 4.8}}};
    return {{.rows = 64,
             .burst = 1.01 * this->by_zeros(),
             .sustained = 0.97 * this->by_zeros(),
             .memory = 0.92,
             .launches = {.full = 1.6, .half = 2.3, .few = 4}}};
  }

 protected:
  LatentVersion version(const FlashMlaTiling& at) const override {
    return {.name = "flash_mla",
            .header = beside(__FILE__, "flash_mla.cuh"),
            .shape = {kFlashMlaThreads, flash_mla_shared_bytes(at.spare), this->side_by_side(64), true},
            .traffic = 0.012f,                    // 73.7 KB at 4.5 TB/s against 1.4 us
            .joins = !is_gathered(problem.page),  // whose consumers have no registers left
            .ahead = at.prefetch,
            .ahead_tiles = problem.ragged ? few_tiles() : std::numeric_limits<std::int64_t>::max()};
  }

  // {evict_first, prefetch, spare}. With few row tiles to read them tokens are used up at once, unless the tiles drift
  // apart over long requests; where the tiles of all requests are few, too, the start of the kernel counts. Where
  // lengths live on the device problem.b is the most requests of a step; how many it has, blocks_ahead() looks at. A
  // spare place helps where tokens are late: with one row tile memory is what binds, with many the power cap, and the
  // instructions for places that change cost what it gains.
  std::vector<FlashMlaTiling> candidates() const override {
    const std::int64_t of_request = row_tiles({});
    const bool ahead = may_prefetch() && of_request <= 2 && (problem.ragged || of_request * problem.b <= few_tiles());
    const bool spare = of_request == 2 && !is_gathered(problem.page);
    const FlashMlaTiling first{of_request <= (problem.ragged ? 2 : 8), ahead ? 2 : 0, spare};
    return distinct({first, {false, 0, spare}, {true, 0, spare}, {true, may_prefetch() ? 2 : 0, spare}});
  }
  std::int64_t few_tiles() const { return target.processors / 3; }

  // What it asks for ahead it learns at run time.
  FlashMlaTiling tiling_at_compile_time(FlashMlaTiling at) const override {
    at.prefetch = 0;
    return at;
  }

  bool takes(const MlaDecodeOptions& options) const override { return !fp8_bytes(options.cache_format); }
  std::shared_ptr<LatentPlan> shared_copy() const override { return std::make_shared<FlashMlaPlan>(*this); }
};

HYPERMLA_REGISTER(FlashMlaPlan,
                  "attention in the latent space, scheduled by hand for Hopper: dense or paged, ragged lengths")

}  // namespace
}  // namespace hypermla::cute
