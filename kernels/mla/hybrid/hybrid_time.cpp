#include "mla/hybrid/hybrid_time.h"

#include <algorithm>

#include "hypermla/plan/registry.h"
#include "mla/attention_time.h"

namespace hypermla {

std::vector<Figures> figures_of(const std::vector<KernelEntry>& kernels) {
  std::vector<Figures> all;
  for (const KernelEntry& kernel : kernels)
    for (const Figures& one : kernel.make()->figures()) all.push_back(one);
  return all;
}

std::vector<Figures> figures_of(const std::string& kernel) {
  return Registry::instance().find(kernel).make()->figures();
}

TimeEstimate hybrid_time(const HybridParts& parts, const HybridProblem& at, const Ceilings& ceilings) {
  const AttentionShape shape = attention_shape(at);
  const int n = at.n;
  mla_var6_plus_cost(shape, n);  // refuses what is no shape
  HybridProblem dense = at;
  dense.ragged = false;
  const HybridPairs pairs = hybrid_pairs(dense);
  const double queries = double(at.b) * at.s;
  const double latent_seen = pairs.latent / queries, decompressed_seen = pairs.decompressed / queries;
  const auto combine = [&](bool latent, bool decompressed) {
    return combine_time(shape, latent, decompressed, parts.combine, ceilings);
  };
  const auto latent_part = [&] {
    AttentionShape of = shape;
    of.t = shape.t - n;
    if (parts.cut) return latent_times_in_parts(of, latent_seen, parts.latent.front(), ceilings);
    return best_times(
        parts.latent, [&](int rows) { return latent_work(of, latent_seen, rows); }, ceilings, ceilings.latent);
  };
  const auto decompressed_part = [&] {
    AttentionShape of = shape;
    of.t = n;
    const bool beside_the_other = parts.together == Together::at_once && n < shape.t;
    const auto& figures = at.prefixes > 0 ? parts.shared : beside_the_other ? parts.beside : parts.decompressed;
    return best_times(
        figures, [&](int rows) { return decompressed_work(of, decompressed_seen, token_stores(at), rows); }, ceilings,
        ceilings.decompressed);
  };
  if (n == 0) return in_turn(estimate(latent_part(), ceilings), combine(true, false));
  if (n == shape.t) return in_turn(estimate(decompressed_part(), ceilings), combine(false, true));
  const double overlap = std::min(1.0, parts.overlap * ceilings.hybrid.overlap);
  TimeEstimate last = combine(true, true);
  last.seconds += ceilings.launch;
  const WorkTimes one = latent_part(), other = decompressed_part();
  if (parts.together == Together::at_once) {
    WorkTimes both = one;
    both += other;
    both.launches = std::max(one.launches, other.launches);
    return in_turn(estimate(both, ceilings, overlap), last);
  }
  const TimeEstimate first = estimate(one, ceilings), second = estimate(other, ceilings);
  if (parts.together == Together::in_turn) return in_turn(in_turn(first, second), last);
  // The longer part decides, at half its speed.
  const TimeEstimate& longer = first.seconds >= second.seconds ? first : second;
  return in_turn({2 * longer.seconds / overlap, longer.limit}, last);
}

}  // namespace hypermla
