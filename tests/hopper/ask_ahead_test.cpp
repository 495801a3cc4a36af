// What a thread block asks L2 for before the kernel in front has ended, run as C++ threads: the boxes of its first
// blocks, and nothing outside of the table where the list of work is not written yet.
#include "latent_case.h"

#include "latent/ask_ahead.cuh"

namespace hypermla::cute {
namespace {

constexpr int kRequests = 3, kWidth = 20, kOutside = 777;

WorkItem item_of(int request, int begin, int end, int tokens) {
  WorkItem item{};
  item.request = request;
  item.begin = begin;
  item.end = end;
  item.tokens = tokens;
  return item;
}

using Boxes = std::vector<std::array<int, 3>>;  // page or request, row, group; 8: RoPE

// `item`: of the second thread block. The pages of request r are 100 r + 1, 100 r + 2, ..
template <int page>
Boxes asked_of(const WorkItem& item, int ahead) {
  std::vector<int> table((kRequests + 2) * kWidth, kOutside);
  for (int i = 0; i < kRequests * kWidth; ++i) table[kWidth + i] = 100 * (i / kWidth) + i % kWidth + 1;
  const std::vector<WorkItem> items = {item_of(2, 9, 10, 640), {}, item, {}};
  LatentArguments with;
  with.work = items.data();
  with.rounds = 2;
  with.block_table = table.data() + kWidth;
  with.table_width = kWidth;
  with.requests = kRequests;
  with.ahead = ahead;
  emulated::asked.clear();
  emulated::run(2, 32, [&] {
    if (blockIdx.x == 1) latent::ask_ahead<latent_case::problem_of(page)>(with);
  });
  Boxes boxes;
  for (const emulated::Asked& at : emulated::asked)
    boxes.push_back({at.batch, at.row, at.map == &with.kpe_map ? 8 : at.group});
  std::sort(boxes.begin(), boxes.end());
  return boxes;
}

// All groups of a box at each place.
Boxes boxes_at(const std::vector<std::array<int, 2>>& places, int groups) {
  Boxes boxes;
  for (const auto& [batch, row] : places)
    for (int group = 0; group <= 8; group += groups) boxes.push_back({batch, row, group});
  return boxes;
}

const WorkItem kItem = item_of(1, 2, 5, 300);

TEST(AskAhead, AsksForTheFirstBlocks) {
  EXPECT_EQ(asked_of<64>(kItem, 2), boxes_at({{103, 0}, {104, 0}}, 2));
  EXPECT_EQ(asked_of<64>(kItem, 4), boxes_at({{103, 0}, {104, 0}, {105, 0}}, 2));
  EXPECT_EQ(asked_of<128>(kItem, 3), boxes_at({{102, 0}, {102, 64}, {103, 0}}, 2));
  EXPECT_EQ(asked_of<16>(kItem, 1), boxes_at({{109, 0}, {110, 0}, {111, 0}, {112, 0}}, 1));
  EXPECT_EQ(asked_of<32>(item_of(0, 0, 5, 70), 2),
            boxes_at({{1, 0}, {2, 0}, {3, 0}}, 1));  // of the second block one page
  EXPECT_EQ(asked_of<0>(kItem, 2), boxes_at({{1, 128}, {1, 192}}, 2));
  EXPECT_EQ(asked_of<64>(kItem, 0), Boxes());
}

TEST(AskAhead, StaysWithinTheTable) {
  for (const WorkItem& item :
       {item_of(kRequests, 0, 5, 300), item_of(-1, 0, 5, 300), item_of(1, 3, 3, 300), item_of(1, -1, 5, 300),
        item_of(1, 0x7fffffff, -1, -1), item_of(1, 5, 9, 300), item_of(2, kWidth, kWidth + 4, 1 << 20)}) {
    SCOPED_TRACE(testing::Message() << "request " << item.request << ", blocks " << item.begin << " to " << item.end);
    EXPECT_EQ(asked_of<64>(item, 3), Boxes());
  }
  EXPECT_EQ(asked_of<64>(item_of(2, kWidth - 1, kWidth + 4, 1 << 20), 3), boxes_at({{220, 0}}, 2));
}

}  // namespace
}  // namespace hypermla::cute
