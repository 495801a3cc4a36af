// overlap() against the bytes themselves.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "hypermla/plan/memory_rows.h"

namespace hypermla::memory_rows_test {
namespace {

std::set<std::int64_t> bytes_of(const MemoryRows& rows) {
  std::set<std::int64_t> bytes;
  for (std::int64_t token = 0; token < rows.tokens; ++token)
    for (std::int64_t head = 0; head < rows.heads; ++head)
      for (std::int64_t i = 0; i < rows.width; ++i)
        bytes.insert(reinterpret_cast<std::intptr_t>(rows.begin) + token * rows.token_stride + head * rows.head_stride +
                     i);
  return bytes;
}

TEST(MemoryRows, WhatIsSaidToOverlapDoes) {
  std::mt19937 random(7);
  const auto from = [&](int first, int last) { return first + int(random() % unsigned(last - first + 1)); };
  int said = 0, shared = 0, plain = 0;
  for (int i = 0; i < 20000; ++i) {
    const int head_stride = from(2, 5), heads = from(1, 3), token_stride = heads * head_stride + from(0, 9);
    const auto rows = [&](bool alike) {
      MemoryRows of = {reinterpret_cast<const char*>(std::intptr_t{1000} + from(0, 80)),
                       from(1, 6),
                       token_stride,
                       heads,
                       head_stride,
                       from(1, head_stride)};
      if (!alike) of.token_stride = from(1, 30) * of.heads, of.head_stride = of.token_stride / of.heads;
      if (of.width > of.head_stride) of.width = of.head_stride;
      return of;
    };
    const MemoryRows a = rows(true), b = rows(random() % 2);
    const std::set<std::int64_t> of_a = bytes_of(a), of_b = bytes_of(b);
    bool same = false;
    for (const std::int64_t byte : of_a) same |= of_b.count(byte) > 0;
    EXPECT_EQ(overlap(a, b), overlap(b, a));
    EXPECT_TRUE(overlap(a, b) || !same);
    shared += same;
    said += overlap(a, b);
    // Of dense tensors, which have no gaps at all, both answers are right.
    if (std::int64_t(of_a.size()) == a.all() && std::int64_t(of_b.size()) == b.all()) {
      ++plain;
      EXPECT_EQ(overlap(a, b), same);
    } else if (a.heads == 1 && b.heads == 1 && overlap(a, b)) {
      EXPECT_TRUE(same);  // without heads there are no gaps within a row
    }
  }
  EXPECT_GT(plain, 300);
  EXPECT_GT(said, 3000);
  EXPECT_LT(said, shared + 2000);
}

TEST(MemoryRows, ColumnsOfTheSameRowsAreApart) {
  const auto at = [](std::intptr_t place) { return reinterpret_cast<const char*>(place); };
  // Tokens at a distance that is no multiple of the heads'.
  const MemoryRows keys = {at(1000), 5, 1300, 3, 400, 256};
  EXPECT_FALSE(overlap(keys, {at(1256), 5, 1300, 3, 400, 128}));
  EXPECT_TRUE(overlap(keys, {at(1255), 5, 1300, 3, 400, 128}));
  EXPECT_TRUE(overlap(keys, {at(1256), 5, 1300, 3, 400, 145}));
}

TEST(MemoryRows, HeadsFirstTheyMayTakeTurnsToo) {
  const auto at = [](std::intptr_t place) { return reinterpret_cast<const char*>(place); };
  const std::int64_t tokens = 5, per_head = tokens * 320;
  const MemoryRows keys = {at(1000), tokens, 192, 3, per_head, 192};
  EXPECT_FALSE(overlap(keys, {at(1000 + tokens * 192), tokens, 128, 3, per_head, 128}));
  EXPECT_TRUE(overlap(keys, {at(1000 + tokens * 192 - 1), tokens, 128, 3, per_head, 128}));
  EXPECT_TRUE(overlap(keys, {at(1000), tokens, 256, 3, per_head + 7, 128}));  // the same first row
}

TEST(MemoryRows, RowsAreApartAsTheirBytesAre) {
  for (int tokens = 1; tokens < 4; ++tokens)
    for (int heads = 1; heads < 4; ++heads)
      for (int token_stride = 1; token_stride < 12; ++token_stride)
        for (int head_stride = 1; head_stride < 12; ++head_stride) {
          const MemoryRows of = {nullptr, tokens, token_stride, heads, head_stride, 2};
          // Rows that lie between each other in turns are refused, too: of kernels no one asks for them.
          EXPECT_TRUE(!rows_apart(of) || int(bytes_of(of).size()) == 2 * tokens * heads)
              << tokens << " at " << token_stride << ", " << heads << " at " << head_stride;
        }
  EXPECT_TRUE(rows_apart({nullptr, 7, 640, 3, 256, 128}));  // every second of five heads
  EXPECT_FALSE(rows_apart({nullptr, 7, 632, 3, 256, 128}));
}

TEST(MemoryRows, TensorsMayTakeTurns) {
  const auto at = [](std::intptr_t place) { return reinterpret_cast<const char*>(place); };
  for (const int tokens : {1, 5}) {
    const MemoryRows by_head = {at(1000), tokens, 4 * 320, 4, 320, 192},
                     behind = {at(1192), tokens, 4 * 320, 4, 320, 128};
    EXPECT_FALSE(overlap(by_head, behind));
    EXPECT_TRUE(overlap(by_head, {at(1191), tokens, 4 * 320, 4, 320, 128}));
    const MemoryRows by_token = {at(1000), tokens, 900, 4, 100, 100};
    EXPECT_FALSE(overlap(by_token, {at(1400), tokens, 900, 5, 100, 100}));
    EXPECT_EQ(overlap(by_token, {at(1401), tokens, 900, 5, 100, 100}), tokens > 1);
  }
}

}  // namespace
}  // namespace hypermla::memory_rows_test
