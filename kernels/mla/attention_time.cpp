#include "mla/attention_time.h"

#include <algorithm>
#include <cmath>

#include "mla/decompressed/decompressed_plan.h"
#include "mla/latent/latent_plan.h"
#include "mla/output_decompression/output_decompression_plan.h"

namespace hypermla {
namespace {

double padded(double rows, int tile) { return std::ceil(rows / tile) * tile; }

// Those that a query sees, and the half block of the diagonal that is computed and masked.
double tokens_computed(const AttentionShape& shape, double seen) { return std::min<double>(shape.t, seen + 64); }

}  // namespace

TiledWork latent_work(const AttentionShape& shape, double seen, int rows_of_tile) {
  const double bytes = flash_mla_cost(shape).bytes;
  const double rows = padded(double(shape.h) * shape.s, rows_of_tile);
  return {{2 * shape.b * rows * tokens_computed(shape, seen) * (2.0 * shape.k + shape.p), bytes},
          shape.b * rows / rows_of_tile};
}

TimeEstimate latent_time(const LatentProblem& at, const std::vector<Figures>& figures, const Ceilings& ceilings) {
  const double seen = mean_tokens_seen(at, at.t);
  const auto work = [&](int rows) {
    TiledWork work = latent_work(attention_shape(at), seen, rows);
    if (at.fp8) work.cost.bytes -= double(at.b) * at.t * (2 * (at.k + at.p) - at.fp8);
    return work;
  };
  return estimate(best_times(figures, work, ceilings, ceilings.latent), ceilings);
}

WorkTimes latent_times_in_parts(const AttentionShape& shape, double seen, const Figures& figures,
                                const Ceilings& ceilings) {
  // The merge, in launches per part: b32 s1 (2 parts) 5 us behind the attention, b8 t8192 (8) 5 us, b1 t65536 (64)
  // 25 us (docs/kernels/flash-mla-split-kv.md).
  constexpr double kMergeOfPart = 0.1;
  TiledWork work = latent_work(shape, seen, figures.rows);
  const double parts = std::max(1.0, std::floor(ceilings.processors / work.tiles));
  work.tiles *= parts;
  WorkTimes times = times_of(figures, work, ceilings, ceilings.latent);
  times.launches += ceilings.launch * parts * kMergeOfPart;
  return times;
}

TiledWork decompressed_work(const AttentionShape& shape, double seen, int stores, int rows_of_tile) {
  flash_attention_cost(shape);  // refuses what is no shape
  const double w = shape.bytes_per_element, heads = double(stores) * shape.h, width = 2.0 * shape.d + shape.p;
  const double rows = padded(std::ceil(double(shape.b) * shape.s / stores), rows_of_tile);
  return {{2 * heads * rows * tokens_computed(shape, seen) * width,
           w * (double(shape.b) * shape.h * shape.s * width + 2 * heads * shape.t * shape.d +
                double(stores) * shape.t * shape.p)},
          heads * rows / rows_of_tile};
}

TimeEstimate decompressed_time(const DecompressedProblem& at, const std::vector<Figures>& figures,
                               const Ceilings& ceilings) {
  const AttentionShape shape{.b = at.b,
                             .s = at.s,
                             .t = at.t,
                             .h = at.h,
                             .d = at.d,
                             .p = at.p,
                             .bytes_per_element = double(dtype_bytes(at.dtype))};
  const double seen = mean_tokens_seen(at.s, at.t, at.causal);
  const auto work = [&](int rows) { return decompressed_work(shape, seen, token_stores(at), rows); };
  return estimate(best_times(figures, work, ceilings, ceilings.decompressed), ceilings);
}

TimeEstimate combine_time(const AttentionShape& shape, bool latent, bool decompressed, const Figures& figures,
                          const Ceilings& ceilings) {
  Cost cost = latent ? output_decompression_cost(shape) : Cost{};
  const double outputs = shape.bytes_per_element * shape.b * shape.h * shape.s * shape.d;
  if (decompressed) cost.bytes += latent ? outputs : 2 * outputs;
  return estimate(times_of(figures, {.cost = cost}, ceilings), ceilings);
}

TimeEstimate output_decompression_time(const OutputDecompressionProblem& at, const std::vector<Figures>& figures,
                                       const Ceilings& ceilings) {
  return estimate(times_of(figures.front(), {.cost = output_decompression_cost(at)}, ceilings), ceilings);
}

}  // namespace hypermla
