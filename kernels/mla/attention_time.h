// What attention does with tiles of some rows, in each form, and how long it takes by the figures of a kernel. Ragged
// and paged requests count as dense ones of t tokens. All throw Error for a shape with an extent below 1.
#pragma once

#include "hypermla/roofline/kernel_time.h"
#include "mla/attention_cost.h"
#include "mla/decompressed/decompressed.h"
#include "mla/latent/latent.h"
#include "mla/output_decompression/output_decompression.h"

namespace hypermla {

// `seen`: tokens that a query sees on average, at most t. The rows of a request are all its heads' queries.
TiledWork latent_work(const AttentionShape& shape, double seen, int rows);
TimeEstimate latent_time(const LatentProblem& at, const std::vector<Figures>& figures, const Ceilings& ceilings);

// Of blocks that own whole tiles, where the tokens of a request are cut into as many parts as still make one wave; with
// the merge of the parts.
WorkTimes latent_times_in_parts(const AttentionShape& shape, double seen, const Figures& figures,
                                const Ceilings& ceilings);

// The rows of a head are the queries of all requests that share its keys: there are `stores` of them, at most b.
TiledWork decompressed_work(const AttentionShape& shape, double seen, int stores, int rows);
TimeEstimate decompressed_time(const DecompressedProblem& at, const std::vector<Figures>& figures,
                               const Ceilings& ceilings);

// What follows attention: latent outputs go through the projection, decompressed ones are added.
TimeEstimate combine_time(const AttentionShape& shape, bool latent, bool decompressed, const Figures& figures,
                          const Ceilings& ceilings);
// Of the output decompression as a kernel of its own.
TimeEstimate output_decompression_time(const OutputDecompressionProblem& at, const std::vector<Figures>& figures,
                                       const Ceilings& ceilings);

}  // namespace hypermla
