// Random cases of MlaCacheOps with what they should give, in double precision: for the CPU, for GPUs, and for the
// kernels run as C++ threads.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "hypermla/base/half.h"
#include "hypermla/mla_cache.h"

namespace hypermla::cache_cases {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The memory of a case: all its tensors, at places that are the same in the memory of any device. What no tensor fills
// is NaN in every type.
struct Memory {
  std::vector<unsigned char> bytes;

  std::size_t add(std::size_t size) {
    const std::size_t at = bytes.size();
    bytes.resize(at + (size + 255) / 256 * 256 + 256, 0xff);
    return at;
  }
  template <class T>
  T& element(std::size_t at, std::int64_t i) {
    return *reinterpret_cast<T*>(&bytes[at + i * sizeof(T)]);
  }
};

// A tensor [tokens, heads, columns] in a Memory.
struct Rows {
  std::size_t at = 0;
  std::int64_t token_stride = 0, head_stride = 0;

  template <class T>
  MlaRows<T> on(char* base) const {
    return {reinterpret_cast<T*>(base + at), token_stride, head_stride};
  }
  std::int64_t row(std::int64_t token, std::int64_t head) const { return token * token_stride + head * head_stride; }
};

// Shapes and layouts follow from the first seed, contents from the second.
class Case {
 public:
  Case(unsigned shape_seed, unsigned content_seed) : shape_(shape_seed), content_(content_seed) {
    dtype = pick(2) ? DType::bfloat16 : DType::float16;
  }
  DType dtype;
  Memory memory;

  // Checks that `after` differs from the memory only where expect() was called, and there as expected.
  void compare(const std::vector<unsigned char>& after) {
    std::vector<unsigned char> left = memory.bytes;
    int wrong = 0;
    for (const Expected& one : expected_) {
      std::copy_n(&after[one.at], one.bytes == kInteger ? 4 : one.bytes, &left[one.at]);
      double value = e4m3_to_float(after[one.at]);
      if (one.bytes == 4) {
        float read;
        std::memcpy(&read, &after[one.at], 4);
        value = read;
      } else if (one.bytes == 2) {
        std::uint16_t bits;
        std::memcpy(&bits, &after[one.at], 2);
        value = to_float(bits, one.type);
      }
      if (one.bytes == kInteger) {
        int read;
        std::memcpy(&read, &after[one.at], 4);
        value = read;
      }
      const bool same = std::isfinite(one.value) ? std::abs(value - one.value) <= one.tolerance
                        : std::isnan(one.value)  ? std::isnan(value)
                                                 : value == one.value;
      if (!same && wrong++ < 3) ADD_FAILURE() << value << " instead of " << one.value << " at byte " << one.at;
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_TRUE(left == after) << "something else was written";
  }

 protected:
  int pick(int count) { return int(shape_() % unsigned(count)); }
  Rows rows(std::int64_t tokens, std::int64_t heads, int columns, int bytes) {
    const int gap = bytes == 2 ? 8 : 1;
    Rows of;
    const std::int64_t inner = columns + gap * pick(3);
    if (pick(2)) {  // tokens first
      of.head_stride = inner;
      of.token_stride = heads * inner + gap * pick(3);
    } else {
      of.token_stride = inner;
      of.head_stride = tokens * inner + gap * pick(3);
    }
    of.at = memory.add(bytes * (of.row(tokens - 1, heads - 1) + columns));
    return of;
  }
  float normal() { return normal_(content_); }
  void fill(std::size_t at, std::int64_t first, int columns, float scale = 1) {
    for (int c = 0; c < columns; ++c)
      memory.element<std::uint16_t>(at, first + c) = from_float(scale * normal(), dtype);
  }
  double value(std::size_t at, std::int64_t i) { return to_float(memory.element<std::uint16_t>(at, i), dtype); }
  // Of 16-bit elements; within the rounding of the type and `more`.
  void expect(std::size_t at, std::int64_t i, double value, double more) {
    const double rounding = dtype == DType::bfloat16 ? 0x1p-8 : 0x1p-10;
    expected_.push_back({at + 2 * i, 2, value, rounding * std::abs(value) + more, dtype});
  }
  void expect_lse(std::size_t at, std::int64_t i, double value) {
    expected_.push_back({at + 4 * i, 4, value, 1e-5 * (1 + std::abs(value)), dtype});
  }
  void expect_integer(std::size_t at, std::int64_t i, int value) {
    expected_.push_back({at + 4 * i, kInteger, double(value), 0, dtype});
  }
  void expect_any(std::size_t at, std::int64_t i) { expected_.push_back({at + 4 * i, kInteger, 0, INFINITY, dtype}); }
  // As `from` has them, bit by bit unless they are NaN.
  void expect_copy(std::size_t at, std::int64_t i, std::size_t from, std::int64_t j, int columns) {
    for (int c = 0; c < columns; ++c) expected_.push_back({at + 2 * (i + c), 2, value(from, j + c), 0, dtype});
  }
  // A token of 656 bytes of the rows from element i of `latent` and j of `rope` on.
  void expect_fp8(std::size_t at, std::size_t latent, std::int64_t i, std::size_t rope, std::int64_t j) {
    for (int first = 0; first < 512; first += 128) {
      double most = 0;
      for (int c = first; c < first + 128; ++c) most = std::fmax(most, std::abs(value(latent, i + c)));
      const float factor = std::max(float(most) / 448, 0x1p-126f);
      expected_.push_back({at + 512 + first / 32, 4, factor, 0, dtype});
      for (int c = first; c < first + 128; ++c)
        expected_.push_back({at + c, 1, nearest_e4m3(float(value(latent, i + c)) / factor), 0, dtype});
    }
    for (int c = 0; c < 64; ++c)
      expected_.push_back({at + 528 + 2 * c, 2,
                           to_float(from_float(float(value(rope, j + c)), DType::bfloat16), DType::bfloat16), 0,
                           DType::bfloat16});
  }
  // A token of 576 bytes of the rows from element i of `latent` and j of `rope` on.
  void expect_divided(std::size_t at, std::size_t latent, std::int64_t i, std::size_t rope, std::int64_t j,
                      float factor) {
    for (int c = 0; c < 576; ++c) {
      const double x = c < 512 ? value(latent, i + c) : value(rope, j + c - 512);
      expected_.push_back({at + c, 1, nearest_e4m3(float(x) / factor), 0, dtype});
    }
  }
  // By comparing with all of them; of an infinity, from which all are as far, the largest.
  static double nearest_e4m3(double x) {
    if (std::isnan(x)) return x;
    int best = 0;
    double least = std::abs(x);
    for (int code = 1; code < 0x7f; ++code) {
      const double distance = std::abs(e4m3_to_float(std::uint8_t(code)) - std::abs(x));
      if (!(distance < least || (distance == least && code % 2 == 0))) continue;
      best = code;
      least = distance;
    }
    return std::copysign(e4m3_to_float(std::uint8_t(best)), x);
  }

  std::mt19937 shape_, content_;

 private:
  static constexpr int kInteger = 32;  // 4 bytes

  struct Expected {
    std::size_t at;
    int bytes;  // 4: fp32, 2: of the type, 1: e4m3, kInteger
    double value, tolerance;
    DType type;
  };
  std::vector<Expected> expected_;
  std::normal_distribution<float> normal_;
};

struct MergeCase : Case {
  int tokens, heads, width;
  bool base2, positive, in_place, lse_wanted;
  Rows a, b, o, lse_a, lse_b, lse;

  explicit MergeCase(unsigned shape, unsigned content = 0) : Case(shape, content) {
    const int widths[] = {512, 128, 8, 24, 504, 256};
    tokens = 1 + pick(20), heads = 1 + pick(9), width = widths[pick(6)];
    base2 = pick(2), positive = pick(2), in_place = pick(2), lse_wanted = pick(4) > 0;
    a = rows(tokens, heads, width, 2), b = rows(tokens, heads, width, 2);
    lse_a = rows(tokens, heads, 1, 4), lse_b = rows(tokens, heads, 1, 4);
    const bool first = pick(2);
    o = in_place ? (first ? a : b) : rows(tokens, heads, width, 2);
    lse = in_place ? (first ? lse_a : lse_b) : rows(tokens, heads, 1, 4);
    const double unit = base2 ? 1 : std::log(2.0);
    for (int t = 0; t < tokens; ++t)
      for (int h = 0; h < heads; ++h) {
        const auto part = [&](const Rows& of, const Rows& of_lse) {  // its log-sum-exp in base 2, -inf if it is empty
          const int kind = int(content_() % 8);
          const float log2 = kind == 0   ? -kInfinity
                             : kind == 1 ? kInfinity
                             : kind == 2 ? 1000 * normal()  // one part outweighs the other by far
                             : kind == 3 && content_() % 8 == 0 ? std::nanf("")
                                                                : 3 * normal();
          memory.element<float>(of_lse.at, of_lse.row(t, h)) = float(log2 * unit);
          if (!std::isinf(log2)) fill(of.at, of.row(t, h), width);  // an empty part stays NaN
          return std::isinf(log2) ? -INFINITY : double(memory.element<float>(of_lse.at, of_lse.row(t, h))) / unit;
        };
        const double log2_a = part(a, lse_a), log2_b = part(b, lse_b), top = std::max(log2_a, log2_b);
        const double weight_a = log2_a == -INFINITY ? 0 : std::exp2(log2_a - top);
        const double weight_b = log2_b == -INFINITY ? 0 : std::exp2(log2_b - top), sum = weight_a + weight_b;
        const bool is_nan = std::isnan(log2_a) || std::isnan(log2_b);
        for (int c = 0; c < width; ++c) {
          const double x = weight_a == 0 ? 0 : weight_a * value(a.at, a.row(t, h) + c);
          const double y = weight_b == 0 ? 0 : weight_b * value(b.at, b.row(t, h) + c);
          expect(o.at, o.row(t, h) + c, is_nan ? NAN : sum == 0 ? 0 : (x + y) / sum, 1e-6);
        }
        if (lse_wanted)
          expect_lse(lse.at, lse.row(t, h),
                     is_nan     ? NAN
                     : sum == 0 ? (positive ? INFINITY : -INFINITY)
                                : (top + std::log2(sum)) * unit);
      }
  }
  void run(MlaCacheOps& ops, char* base, void* stream) const { ops.merge_states(on(base), stream); }
  MlaCacheOps::Merge on(char* base) const {
    return {.a = {a.on<const void>(base), lse_a.on<const float>(base)},
            .b = {b.on<const void>(base), lse_b.on<const float>(base)},
            .o = o.on<void>(base),
            .lse = lse_wanted ? lse.on<float>(base) : MlaRows<float>{},
            .tokens = tokens,
            .heads = heads,
            .width = width,
            .lse_base2 = base2,
            .empty_lse_positive = positive};
  }
};

// A cache: rows of 576, of 640 with a gap between pages, or latent and rotary parts apart; or in FP8.
struct CacheCase : Case {
  static constexpr int kPages[] = {64, 16, 1, 48};
  MlaCache cache = {};
  std::size_t latent_at = 0, rope_at = 0;

  CacheCase(unsigned shape, unsigned content, int tokens, MlaCacheFormat format = MlaCacheFormat::as_queries)
      : Case(shape, content) {
    cache.page = kPages[pick(4)];
    cache.pages = tokens / cache.page + 1 + pick(4);
    cache.format = format;
    if (const int bytes = fp8_bytes(format)) {
      cache.latent_token_stride = bytes + 16 * pick(2);
      cache.latent_page_stride = cache.latent_token_stride * cache.page + 16 * pick(3);
      latent_at = memory.add(cache.pages * cache.latent_page_stride);
    } else if (pick(2)) {
      const int width = 576 + 64 * pick(2);
      cache.latent_token_stride = cache.rope_token_stride = width;
      cache.latent_page_stride = cache.rope_page_stride = width * cache.page + 8 * pick(3);
      latent_at = memory.add(2 * cache.pages * cache.latent_page_stride);
      rope_at = latent_at + 1024;
    } else {
      cache.latent_token_stride = 512 + 8 * pick(2);
      cache.rope_token_stride = 64 + 8 * pick(2);
      cache.latent_page_stride = cache.latent_token_stride * cache.page + 8 * pick(2);
      cache.rope_page_stride = cache.rope_token_stride * cache.page + 8 * pick(2);
      latent_at = memory.add(2 * cache.pages * cache.latent_page_stride);
      rope_at = memory.add(2 * cache.pages * cache.rope_page_stride);
    }
  }
  MlaCache cache_on(char* base) const {
    MlaCache result = cache;
    result.latent = base + latent_at;
    if (cache.format == MlaCacheFormat::as_queries) result.rope = base + rope_at;
    return result;
  }
  std::int64_t latent_of(std::int64_t slot) const {
    return slot / cache.page * cache.latent_page_stride + slot % cache.page * cache.latent_token_stride;
  }
  std::int64_t rope_of(std::int64_t slot) const {
    return slot / cache.page * cache.rope_page_stride + slot % cache.page * cache.rope_token_stride;
  }
};

struct AppendCase : CacheCase {
  int tokens;
  std::size_t latent_rows, rope_rows, slots_at, scale_at;
  std::int64_t latent_stride, rope_stride;

  // `beyond`: some slots are not the cache's.
  AppendCase(unsigned shape, unsigned content, bool beyond, MlaCacheFormat format = MlaCacheFormat::as_queries)
      : CacheCase(shape, content, 100, format) {
    tokens = 1 + pick(100);
    if (pick(2)) {
      latent_stride = rope_stride = 576 + 8 * pick(2);
      latent_rows = memory.add(2 * tokens * latent_stride);
      rope_rows = latent_rows + 1024;
    } else {
      latent_stride = 512 + 8 * pick(2), rope_stride = 64 + 128 * pick(2);
      latent_rows = memory.add(2 * tokens * latent_stride);
      rope_rows = memory.add(2 * tokens * rope_stride);
    }
    slots_at = memory.add(8 * tokens);
    scale_at = memory.add(4);
    // With all but the first there are ties; with 7 a product with the reciprocal misses them.
    const float factors[] = {0.004f, 7 * 0x1p-9f, 0x1p-6f, 1.0f};
    const float factor = format == MlaCacheFormat::fp8_576 ? factors[(unsigned(pick(4)) + content_()) % 4] : kInfinity;
    memory.element<float>(scale_at, 0) = factor;
    std::vector<std::int64_t> slots(cache.pages * cache.page);
    for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = std::int64_t(i);
    std::shuffle(slots.begin(), slots.end(), content_);
    for (int i = 0; i < tokens; ++i) {
      fill(latent_rows, i * latent_stride, 512);
      fill(rope_rows, i * rope_stride, 64);
      if (fp8_bytes(format)) vary(latent_rows, i * latent_stride);
      if (format == MlaCacheFormat::fp8_576) vary_one(rope_rows, i * rope_stride, 64);
      const std::int64_t end = cache.pages * cache.page,
                         outside[] = {end, -2, std::int64_t{1} << 32, std::numeric_limits<std::int64_t>::min()};
      const bool skipped = content_() % 4 == 0;
      const std::int64_t slot = skipped ? (beyond ? outside[content_() % 4] : -1) : slots[i];
      memory.element<std::int64_t>(slots_at, i) = slot;
      if (skipped) continue;
      if (format == MlaCacheFormat::fp8_656) {
        expect_fp8(latent_at + latent_of(slot), latent_rows, i * latent_stride, rope_rows, i * rope_stride);
        continue;
      }
      if (format == MlaCacheFormat::fp8_576) {
        expect_divided(latent_at + latent_of(slot), latent_rows, i * latent_stride, rope_rows, i * rope_stride, factor);
        continue;
      }
      expect_copy(latent_at, latent_of(slot), latent_rows, i * latent_stride, 512);
      expect_copy(rope_at, rope_of(slot), rope_rows, i * rope_stride, 64);
    }
  }
  explicit AppendCase(unsigned shape, unsigned content = 0) : AppendCase(shape, content, false) {}
  // What is special for FP8, in groups of 128 values: other magnitudes, an outlier, zeros, tiny numbers, NaN, infinity.
  void vary(std::size_t at, std::int64_t first) {
    for (int group = 0; group < 4; ++group) vary_one(at, first + 128 * group, 128);
  }
  void vary_one(std::size_t at, std::int64_t from, int columns) {
    const int kind = int(content_() % 16);
    std::uint16_t& one = memory.element<std::uint16_t>(at, from + int(content_() % unsigned(columns)));
    if (kind < 4) fill(at, from, columns, kind == 0 ? 0.0f : kind == 1 ? 1e-6f : kind == 2 ? 1e3f : 0x1p-130f);
    if (kind == 4) one = from_float(1e4f, dtype);
    if (kind == 5) one = from_float(NAN, dtype);
    if (kind == 6) one = from_float(kInfinity, dtype);
    if (kind == 7) one = from_float(kInfinity, dtype) | 1;  // a signalling NaN
  }
  void run(MlaCacheOps& ops, char* base, void* stream) const { ops.append(on(base), stream); }
  MlaCacheOps::Append on(char* base) const {
    return {.latent = base + latent_rows,
            .rope = base + rope_rows,
            .latent_stride = latent_stride,
            .rope_stride = rope_stride,
            .slots = reinterpret_cast<const std::int64_t*>(base + slots_at),
            .tokens = tokens,
            .cache = cache_on(base),
            .cache_scale =
                cache.format == MlaCacheFormat::fp8_576 ? reinterpret_cast<const float*>(base + scale_at) : nullptr};
  }
};

struct DecompressCase : CacheCase {
  int tokens, heads;
  std::size_t table_at, weights_at[2];
  std::int64_t inner[2];     // the stride that is not 1
  bool latent_innermost[2];  // of w_uk, of w_uv
  bool rope_wanted;
  Rows k, v;

  explicit DecompressCase(unsigned shape, unsigned content = 0, int most_tokens = 40, int most_heads = 3)
      : CacheCase(shape, content, most_tokens) {
    tokens = 1 + pick(most_tokens), heads = 1 + pick(most_heads);
    rope_wanted = pick(2);
    for (const int i : {0, 1}) {
      latent_innermost[i] = pick(2);
      const int columns = latent_innermost[i] ? 512 : 128, lines = 640 - columns;
      inner[i] = columns + 8 * pick(2);
      weights_at[i] = memory.add(2 * heads * lines * inner[i]);
      for (int line = 0; line < heads * lines; ++line)
        fill(weights_at[i], line * inner[i], columns, float(1 / std::sqrt(512.0)));
    }
    k = rows(tokens, heads, rope_wanted ? 192 : 128, 2);
    v = rows(tokens, heads, 128, 2);
    std::vector<int> pages(cache.pages);
    for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = int(i);
    std::shuffle(pages.begin(), pages.end(), content_);
    const int width = (tokens + cache.page - 1) / cache.page;
    table_at = memory.add(4 * width);
    for (int i = 0; i < width; ++i) memory.element<int>(table_at, i) = pages[i];
    for (int t = 0; t < tokens; ++t) {
      const std::int64_t slot = std::int64_t{pages[t / cache.page]} * cache.page + t % cache.page;
      fill(latent_at, latent_of(slot), 512);
      fill(rope_at, rope_of(slot), 64);
      for (int h = 0; h < heads; ++h) {
        if (rope_wanted) expect_copy(k.at, k.row(t, h) + 128, rope_at, rope_of(slot), 64);
        for (const int i : {0, 1})
          for (int column = 0; column < 128; ++column) {
            double sum = 0;
            const std::int64_t head_at = std::int64_t{h} * (latent_innermost[i] ? 128 : 512) * inner[i];
            for (int c = 0; c < 512; ++c)
              sum +=
                  value(latent_at, latent_of(slot) + c) *
                  value(weights_at[i], head_at + (latent_innermost[i] ? column * inner[i] + c : c * inner[i] + column));
            const Rows& out = i ? v : k;
            expect(out.at, out.row(t, h) + column, sum, 1e-4);
          }
      }
    }
  }
  void run(MlaCacheOps& ops, char* base, void* stream) const { ops.decompress_prefix(on(base), stream); }
  MlaCacheOps::Decompress on(char* base) const {
    const auto weights = [&](int i) {  // w_uk is [.., column, latent], w_uv [.., latent, column]
      const bool last_dense = latent_innermost[i] == (i == 0);
      return MlaCacheOps::Decompress::Weights{base + weights_at[i], (latent_innermost[i] ? 128 : 512) * inner[i],
                                              last_dense ? inner[i] : 1, last_dense ? 1 : inner[i]};
    };
    Rows k_rope = k;
    k_rope.at += 2 * 128;
    return {.cache = cache_on(base),
            .block_table = reinterpret_cast<const int*>(base + table_at),
            .tokens = tokens,
            .heads = heads,
            .w_uk = weights(0),
            .w_uv = weights(1),
            .k = k.on<void>(base),
            .k_rope = rope_wanted ? k_rope.on<void>(base) : MlaRows<void>{},
            .v = v.on<void>(base)};
  }
};

// Requests whose tables begin with prefixes, parts of them, several or none; some prefixes are not valid, are written
// to, or are shared by too few.
struct SplitCase : Case {
  static constexpr int kPages[] = {64, 16, 1, 48}, kCachePages = 1000;
  int requests, width, page, count, tokens, prefix_width;
  std::size_t table_at, lengths_at, starts_at, slots_at, prefixes_at, prefix_pages_at, owners_at;
  std::size_t found_at, own_table_at, own_lengths_at, query_starts_at, token_starts_at, rows_at;
  std::int64_t table_stride, own_stride, prefix_stride;

  explicit SplitCase(unsigned shape, unsigned content = 0) : Case(shape, content) {
    requests = pick(4) ? pick(30) : pick(2100), width = 1 + pick(20), page = kPages[pick(4)], count = pick(8);
    if (count == 7) count = MlaCacheOps::kMaxPrefixes;
    tokens = pick(3) ? pick(40) : pick(9000), prefix_width = 1 + pick(12);
    table_stride = width + pick(5), own_stride = width + pick(5), prefix_stride = prefix_width + pick(3);
    table_at = memory.add(4 * requests * table_stride), own_table_at = memory.add(4 * requests * own_stride);
    lengths_at = memory.add(4 * requests), own_lengths_at = memory.add(4 * requests);
    starts_at = memory.add(4 * requests + 4), slots_at = memory.add(8 * tokens), found_at = memory.add(4 * requests);
    prefixes_at = memory.add(16 * count), prefix_pages_at = memory.add(4 * count * prefix_stride);
    owners_at = memory.add(4 * kCachePages);
    query_starts_at = memory.add(8 * count), token_starts_at = memory.add(8 * count),
    rows_at = memory.add(16 * requests);

    const auto dice = [&](int sides) { return int(content_() % unsigned(sides)); };
    std::vector<MlaCacheOps::Prefix> prefixes(count);
    std::vector<std::vector<int>> pages(count);
    std::vector<int> places(count);
    for (int p = 0; p < count; ++p) places[p] = p;
    std::shuffle(places.begin(), places.end(), content_);
    for (int page_number = 0; page_number < kCachePages; ++page_number) element<unsigned>(owners_at, page_number) = 0;
    for (int p = 0; p < count; ++p) {
      if (p > 0 && dice(2)) pages[p] = pages[dice(p)];  // begins as another does, or ends where it does
      if (!pages[p].empty() && dice(3) == 0) pages[p].resize(1 + dice(int(pages[p].size())));
      const int wanted = dice(5) ? 1 + dice(prefix_width) : 0;
      while (int(pages[p].size()) < wanted) pages[p].push_back(dice(kCachePages));
      prefixes[p] = {.pages = int(pages[p].size()),
                     .first_token = places[p] * prefix_width * page,
                     .least_queries = dice(2) ? 0 : dice(2 * requests + 2),
                     .valid = dice(5) > 0};
      element<MlaCacheOps::Prefix>(prefixes_at, p) = prefixes[p];
      for (std::size_t i = 0; i < pages[p].size(); ++i) {
        element<int>(prefix_pages_at, p * prefix_stride + int(i)) = pages[p][i];
        element<unsigned>(owners_at, pages[p][i]) |= 1u << p;
      }
    }
    for (int i = 0; i < tokens; ++i) {
      const int which = count > 0 && dice(4 * tokens) == 0 ? dice(count) : -1;
      const int to =
          which >= 0 && !pages[which].empty() ? pages[which][dice(int(pages[which].size()))] : dice(kCachePages + 50);
      const unsigned owners = to < kCachePages ? element<unsigned>(owners_at, to) : 0;
      const bool writes = (which >= 0 || owners == 0) && dice(9) > 0;
      element<std::int64_t>(slots_at, i) = writes ? std::int64_t{to} * page + dice(page) : -1 - dice(2);
      for (int p = 0; p < count && writes; ++p)
        if (owners >> p & 1) prefixes[p].valid = 0;
    }
    for (int p = 0; p < count; ++p) expect_integer(prefixes_at + 12, 4 * p, prefixes[p].valid);

    std::vector<int> lengths(requests), starts{0}, found(requests, -1), queries(count);
    for (int r = 0; r < requests; ++r) {
      for (int i = 0; i < table_stride; ++i) element<int>(table_at, r * table_stride + i) = dice(kCachePages);
      const int like = count > 0 && dice(5) ? dice(count) : -1, of_request = dice(4);
      lengths[r] = dice(width * page + 1);
      if (like >= 0) {
        const int same = dice(8) ? int(pages[like].size()) : dice(int(pages[like].size()) + 1);
        for (int i = 0; i < std::min(same, width); ++i) element<int>(table_at, r * table_stride + i) = pages[like][i];
        // As many tokens, one less, or more: those of the step are not counted.
        if (dice(4))
          lengths[r] = std::min(same * page + of_request - (dice(3) == 0) + (dice(2) ? dice(page) : 0), width * page);
      }
      lengths[r] = dice(10) ? std::max(lengths[r], 0) : 0;
      element<int>(lengths_at, r) = lengths[r];
      starts.push_back(starts.back() + of_request);
      for (int p = 0; p < count; ++p) {
        const int n = int(pages[p].size());
        bool has = n > 0 && n <= width && prefixes[p].valid && n * page <= lengths[r] - of_request;
        for (int i = 0; i < n && has; ++i) has = element<int>(table_at, r * table_stride + i) == pages[p][i];
        if (has && (found[r] < 0 || n > int(pages[found[r]].size()))) found[r] = p;
      }
      if (found[r] >= 0) queries[found[r]] += of_request;
    }
    for (int r = 0; r <= requests; ++r) element<int>(starts_at, r) = starts[r];
    for (int p = 0; p < count; ++p)
      if (dice(2))  // exactly as many as it takes, or one too few
        element<MlaCacheOps::Prefix>(prefixes_at, p).least_queries = prefixes[p].least_queries = queries[p] + dice(2);
    for (int p = 0; p < count; ++p)
      if (queries[p] < prefixes[p].least_queries) queries[p] = 0;
    for (int r = 0; r < requests; ++r) {
      if (found[r] >= 0 && queries[found[r]] == 0) found[r] = -1;
      const int taken = found[r] < 0 ? 0 : int(pages[found[r]].size()), own = lengths[r] - taken * page;
      expect_integer(own_lengths_at, r, own);
      if (count > 0) expect_any(found_at, r);
      for (int i = 0; i * page < own; ++i)
        expect_integer(own_table_at, r * own_stride + i, element<int>(table_at, r * table_stride + taken + i));
    }
    std::vector<int> order;
    for (int p = 0; p < count; ++p) order.push_back(p);
    const auto first = [&](int p) { return pages[p].empty() ? -1 : prefixes[p].first_token; };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return first(a) < first(b); });
    int at = 0, last_token = 0;
    for (int i = 0; i < count; ++i) {
      const int p = order[i];
      expect_integer(query_starts_at, 2 * i, at);
      for (int r = 0; r < requests; ++r)
        for (int query = starts[r]; query < starts[r + 1] && found[r] == p; ++query)
          expect_integer(rows_at, at++, query);
      expect_integer(query_starts_at, 2 * i + 1, at);
      const int begin = std::max(first(p), 0), end = begin + int(pages[p].size()) * page;
      expect_integer(token_starts_at, 2 * i, begin);
      expect_integer(token_starts_at, 2 * i + 1, end);
      if (last_token > begin) ADD_FAILURE() << "token starts fall";
      last_token = end;
    }
  }
  template <class T>
  T& element(std::size_t at, std::int64_t i) {
    return memory.element<T>(at, i);
  }
  void run(MlaCacheOps& ops, char* base, void* stream) const { ops.split_prefixes(on(base), stream); }
  MlaCacheOps::Split on(char* base) const {
    const auto integers = [&](std::size_t at) { return reinterpret_cast<int*>(base + at); };
    return {.block_table = integers(table_at),
            .table_stride = table_stride,
            .width = width,
            .lengths = integers(lengths_at),
            .query_starts = integers(starts_at),
            .requests = requests,
            .slots = reinterpret_cast<const std::int64_t*>(base + slots_at),
            .tokens = tokens,
            .page = page,
            .prefixes = reinterpret_cast<MlaCacheOps::Prefix*>(base + prefixes_at),
            .prefix_pages = integers(prefix_pages_at),
            .prefix_pages_stride = prefix_stride,
            .count = count,
            .owners = reinterpret_cast<const unsigned*>(base + owners_at),
            .cache_pages = kCachePages,
            .found = reinterpret_cast<unsigned*>(base + found_at),
            .own_table = integers(own_table_at),
            .own_table_stride = own_stride,
            .own_lengths = integers(own_lengths_at),
            .shared_query_starts = integers(query_starts_at),
            .shared_token_starts = integers(token_starts_at),
            .query_rows = integers(rows_at)};
  }
};

}  // namespace hypermla::cache_cases
