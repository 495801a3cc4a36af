// How the thread blocks of a launch start, run as C++ threads: which of them wait, and which let the next kernel start.
#include "latent_case.h"

#include "latent/start.cuh"

namespace hypermla::cute {
namespace {

constexpr int kHeads = 64, kShared = 2, kMany = 3;  // queries whose row tiles neighbours share, and one too many

WorkItem item_of(int queries, int blocks) {
  WorkItem item{};
  item.begin = 7;
  item.end = 7 + blocks;
  item.queries = queries;
  return item;
}

LatentArguments arguments() {
  LatentArguments with;
  with.heads = kHeads;
  return with;
}

// Of the last of `blocks` thread blocks.
unsigned clocks_passed(const WorkItem& first, int blocks) {
  const LatentArguments with = arguments();
  unsigned clocks = 0;
  emulated::run(blocks, 1, [&] {
    emulated::passed_clocks = 0;
    latent::start_apart(first, with);
    if (int(blockIdx.x) == blocks - 1) clocks = emulated::passed_clocks;
  });
  return clocks;
}

TEST(Start, IsTogetherForNeighboursAndApartForOthers) {
  const WorkItem enough = item_of(kShared, latent::kLeastToStartApart);
  EXPECT_EQ(clocks_passed(enough, 2), 0);
  EXPECT_EQ(clocks_passed(enough, 3), latent::kStartApart);
  EXPECT_EQ(clocks_passed(enough, 4), latent::kStartApart);
  EXPECT_EQ(clocks_passed(enough, 132), 65 * latent::kStartApart);
}

TEST(Start, IsTogetherWhereItemsAreShortOrManyShareTokens) {
  EXPECT_EQ(clocks_passed(item_of(kShared, latent::kLeastToStartApart - 1), 4), 0);
  EXPECT_EQ(clocks_passed(item_of(kMany, 100), 4), 0);
  EXPECT_EQ(clocks_passed(item_of(kShared, 0), 4), 0);  // no work
}

bool lets_next_start(std::vector<WorkItem> items) {
  const LatentArguments with = arguments();
  items.push_back({});
  emulated::launched_next = 0;
  emulated::run(1, 1, [&] { latent::launch_next_if_short(items.data(), with); });
  return emulated::launched_next > 0;
}

TEST(Start, OfTheNextKernelWaitsForLongListsThatManyShare) {
  const int most = latent::kLongList;
  EXPECT_TRUE(lets_next_start({}));
  EXPECT_TRUE(lets_next_start({item_of(kMany, most)}));
  EXPECT_FALSE(lets_next_start({item_of(kMany, most + 1)}));
  EXPECT_FALSE(lets_next_start({item_of(kMany, most), item_of(kMany, 1)}));
  EXPECT_TRUE(lets_next_start({item_of(kMany, most), item_of(kShared, 100)}));
}

}  // namespace
}  // namespace hypermla::cute
