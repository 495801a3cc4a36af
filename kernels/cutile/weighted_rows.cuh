// Rows of an output whose weights are relative to a maximum: of tokens as they come (online softmax as in
// FlashAttention, arXiv 2205.14135), and of parts that are normalised by themselves and merged by their log-sum-exp. A
// row that sees nothing ends with output 0 and log-sum-exp -inf.
//
// Tiles only, and no lambdas: a captured view loses its aliasing guarantee and with it TMA, and a struct of tiles that
// a lambda captures goes to memory (merge_parts on sm_90: 2671 instructions, not 1951). As they stand the functions
// compile to what the same lines give in a kernel.
#pragma once

#include "tile.h"

namespace hypermla {

// By what an output is divided: by 1 where nothing is seen.
template <class Rows>
inline Rows divisor_of(Rows row_sum, Rows divisor) {  // (Bm, 1)
  return ct::select(row_sum == 0.0f, ct::full<Rows>(1.0f), divisor);
}

template <int Bm, int N>
struct OnlineSoftmax {
  using Rows = ct::tile<float, ct::shape<Bm, 1>>;

  Rows row_max = ct::full<Rows>(kLowest);                                                  // (Bm, 1), in units of log2
  Rows row_sum = ct::zeros<Rows>();                                                        // (Bm, 1)
  ct::tile<float, ct::shape<Bm, N>> acc = ct::zeros<ct::tile<float, ct::shape<Bm, N>>>();  // (Bm, N)
  Rows rescale = ct::zeros<Rows>();  // (Bm, 1), of what was added before the last weights

  // The weights of more tokens, whose values are then to be added.
  template <class Scores>
  Scores weights(Scores scores, float scale_log2) {                                                    // (Bm, Bn)
    auto new_max = ct::max(row_max, ct::reduce_max(scores, ct::integral_constant<1>{}) * scale_log2);  // (Bm, 1)
    auto weights = ct::exp2(scores * scale_log2 - new_max, kFlush);                                    // (Bm, Bn)
    rescale = ct::exp2(row_max - new_max, kFlush);                                                     // (Bm, 1)
    row_sum = row_sum * rescale + ct::sum(weights, ct::integral_constant<1>{});                        // (Bm, 1)
    row_max = new_max;                                                                                 // (Bm, 1)
    return weights;
  }
  template <class Weights, class Values>
  void add(Weights weights, Values values) {  // (Bm, Bn), (Bn, N)
    acc = ct::mma(weights, values, acc * rescale);
  }
  auto output() const { return acc * (1.0f / divisor_of(row_sum, row_sum)); }  // (Bm, N)
  auto lse_log2() const { return row_max + ct::log2(row_sum); }                // (Bm, 1)
};

// First see() the log-sum-exp of every part, natural or in units of log2, then add to `acc` the output of each times
// its weight().
template <int Bm, int N, bool natural = true>
struct MergedParts {
  using Rows = ct::tile<float, ct::shape<Bm, 1>>;

  Rows lse_max = ct::full<Rows>(kLowest);                                                  // (Bm, 1)
  Rows sum = ct::zeros<Rows>();                                                            // (Bm, 1)
  ct::tile<float, ct::shape<Bm, N>> acc = ct::zeros<ct::tile<float, ct::shape<Bm, N>>>();  // (Bm, N)

  void see(Rows lse) { lse_max = ct::max(lse_max, lse); }
  Rows weight(Rows lse) {                                                        // (Bm, 1)
    auto weight = ct::exp2(natural ? (lse - lse_max) * kLog2e : lse - lse_max);  // (Bm, 1)
    sum = sum + weight;
    return weight;
  }
  auto output() const { return acc * (1.0f / divisor_of(sum, sum)); }  // (Bm, N)
  auto lse() const {                                                   // (Bm, 1)
    if constexpr (natural)
      return lse_max + ct::log2(sum) * kLn2;
    else
      return lse_max + ct::log2(sum);
  }
};

}  // namespace hypermla
