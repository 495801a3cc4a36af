// Makes the list of a prefill step (prefill_list.h) from where requests begin. One thread block.
//
// Requests are sorted by their tokens, roughly: into classes of lengths that differ by at most an eighth. Which of a
// class comes first is left to chance; it changes no result. Starts that are negative or go beyond the capacity are cut
// to it and reported. Where query starts fall there are no tiles: requests would share queries, and have more tiles in
// all than an integer holds.
#pragma once

#include "latent/plan_requests.cuh"  // sum_before
#include "prefill_list.h"

namespace hypermla::cute {

inline constexpr int kLengthClasses = 128;
inline constexpr int kFalls = 4;  // beside the bits of PrefillStatus, and in no status

// Class 0 are requests without tokens. Blocks up to 8192 have 3 bits behind the leading one.
__device__ __forceinline__ int length_class(int tokens) {
  if (tokens == 0) return 0;
  const int blocks = (tokens + kBlock - 1) / kBlock;
  return (__float_as_int(static_cast<float>(blocks)) >> 20) - (127 << 3) + 1;
}

template <PlanPrefillTiling tiling>
__global__ void __launch_bounds__(tiling.threads, 1) plan_prefill(const __grid_constant__ PlanPrefillArguments with) {
  constexpr int kThreads = tiling.threads;
  static_assert(kThreads > kLengthClasses);
  __shared__ int of_class[kLengthClasses];  // requests; then where the next one of the class goes
  __shared__ short order[kMaxPlannedRequests];
  __shared__ int sums[kThreads / 32], wrong;
  const int thread = threadIdx.x, b = with.requests;

  auto read = [&](int r) {
    const int query = with.query_starts[r], token = with.token_starts[r];
    const long long queries = static_cast<long long>(with.query_starts[r + 1]) - query,
                    tokens = static_cast<long long>(with.token_starts[r + 1]) - token;
    const bool falls = queries < 0, fit = query >= 0 && !falls && query + queries <= with.all_queries;
    const int used =
        token < 0 || tokens < 0 ? 0 : static_cast<int>(min(tokens, static_cast<long long>(with.max_tokens)));
    return PrefillItem{
        .first_tile = 0,
        .section = 0,
        .query = query,
        .queries = fit ? static_cast<int>(queries) : 0,
        .token = token,
        .tokens = used,
        .wrong = (fit ? 0 : kWrongQueryStarts) | (falls ? kFalls : 0) | (used == tokens ? 0 : kWrongTokenStarts),
        .unused = 0};
  };

  launch_next();
  wait_for_previous();
  if (thread < kLengthClasses) of_class[thread] = 0;
  if (thread == 0) wrong = 0;
  __syncthreads();
  for (int r = thread; r < b; r += kThreads) {
    const PrefillItem item = read(r);
    if (item.queries > 0) atomicAdd(&of_class[length_class(item.tokens)], 1);
    if (item.wrong) atomicOr(&wrong, item.wrong);
  }
  __syncthreads();
  const int own_class = kLengthClasses - 1 - thread;  // long requests first
  const int place = sum_before<kThreads>(own_class >= 0 ? of_class[own_class] : 0, sums).before;
  if (own_class >= 0) of_class[own_class] = place;
  __syncthreads();
  for (int r = thread; r < b; r += kThreads) {
    const PrefillItem item = read(r);
    if (item.queries > 0) order[atomicAdd(&of_class[length_class(item.tokens)], 1)] = static_cast<short>(r);
  }
  __syncthreads();

  const int items = wrong & kFalls ? 0 : of_class[0];  // behind the last of the last class
  const int each = (items + kThreads - 1) / kThreads, first = min(items, thread * each),
            last = min(items, first + each);
  int tiles = 0;
  for (int i = first; i < last; ++i) tiles += prefill_row_tiles(read(order[i]).queries) * with.heads;
  int at = sum_before<kThreads>(tiles, sums).before;
  for (int i = first; i < last; ++i) {
    PrefillItem item = read(order[i]);
    item.first_tile = at;
    const long long bytes = static_cast<long long>(max(item.tokens, 1)) * 2 * 128 * 2;  // keys and values of a head
    item.section = static_cast<int>(
        max(1ll, min((static_cast<long long>(tiling.section) << 20) / bytes, static_cast<long long>(with.heads))));
    reinterpret_cast<PrefillItem*>(with.list + 1)[i] = item;
    at += prefill_row_tiles(item.queries) * with.heads;
  }
  if (thread == kThreads - 1) *with.list = {.tiles = at, .items = items, .drawn = 0, .status = wrong & ~kFalls};
}

}  // namespace hypermla::cute
