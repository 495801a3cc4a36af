// The load of a tile's queries, run as plain C++: the rows of its request, wherever heads and queries lie, and zeros
// behind them.
#include <numeric>

#include "latent_case.h"

#include "latent/load_queries.cuh"

namespace hypermla::cute {
namespace {

constexpr int kRows = 64, kWidth = latent_case::kWidth;

// The queries of a batch in a tensor with room between them: strides in elements.
struct Queries {
  int heads, head_stride, token_stride, inner;  // inner: heads, or 1 where rows follow each other
  std::vector<int> of_request;
};

void check(const Queries& at) {
  const int all = std::accumulate(at.of_request.begin(), at.of_request.end(), 0);
  std::vector<std::uint16_t> q(all * at.token_stride + at.heads * at.head_stride, 0x7fc0);
  for (int query = 0; query < all; ++query)
    for (int head = 0; head < at.heads; ++head)
      for (int c = 0; c < kWidth; ++c)
        q[query * at.token_stride + head * at.head_stride + c] = std::uint16_t(1 + (query * at.heads + head) * 7 + c);
  LatentArguments with;
  with.heads = at.heads;
  with.query_inner = Divisor(at.inner);
  with.query_places = all * at.heads / at.inner;
  const RowAxes axes = {at.inner, at.head_stride, with.query_places, at.inner == 1 ? at.head_stride : at.token_stride};
  const auto map = [&](int column, int columns, int groups) {
    return emulated::map_of(rows_source(DType::bfloat16, &q[column], columns, axes, kRows, groups));
  };
  with.qc_map = map(0, latent_case::kLatent, 2);
  with.qpe_map = map(latent_case::kLatent, latent_case::kRope, 1);

  WorkItem item{};
  for (std::size_t r = 0; r < at.of_request.size(); item.first_row += at.of_request[r] * at.heads, ++r) {
    item.queries = at.of_request[r];
    const int rows = item.queries * at.heads;
    for (item.row_tile = 0; item.row_tile * kRows < rows; ++item.row_tile) {
      emulated::run(1, 32, [&] {
        if (threadIdx.x != 0) return;
        std::fill(std::begin(dynamic), std::end(dynamic), 0xff);
        const u32 barrier = 9 * kRows * 128;
        barrier_init(barrier, 1);
        latent::load_queries<kRows, 8, 2, 9 * kRows * 128>(0, item, with, barrier);
        barrier_wait(barrier, 0);
      });
      for (int row = 0; row < kRows; ++row)
        for (int c = 0; c < kWidth; ++c) {
          const unsigned place = emulated::swizzled_address((c / 64 * kRows + row) * 128 + c % 64 * 2);
          std::uint16_t got;
          std::memcpy(&got, dynamic + place, 2);
          const int of_request = item.row_tile * kRows + row;
          const int expected = of_request < rows ? 1 + (item.first_row + of_request) * 7 + c : 0;
          ASSERT_EQ(got, std::uint16_t(expected)) << "request " << r << " row " << of_request << " column " << c;
        }
    }
  }
}

TEST(LoadQueries, OfOneRequestAndZerosBehindIt) {
  check({24, kWidth, 24 * kWidth, 1, {1, 3, 0, 6, 2}});     // tiles begin and end within a query
  check({16, kWidth, 16 * kWidth, 1, {8, 1, 5, 4}});        // ends of requests, and of tiles
  check({128, kWidth, 128 * kWidth, 1, {1, 2}});            // no tile ends within a query
  check({96, kWidth + 64, 96 * (kWidth + 64), 1, {2, 1}});  // rows of a wider tensor
}

TEST(LoadQueries, OfHeadsThatLieApart) {
  check({16, 12 * kWidth, kWidth, 16, {5, 1, 4, 2}});  // [heads, tokens]
  check({16, kWidth, 20 * kWidth, 16, {3, 5}});        // [tokens, heads of more]
  check({128, 5 * kWidth, kWidth, 128, {1, 3, 1}});    // of which a tile has a part of the heads
}

}  // namespace
}  // namespace hypermla::cute
