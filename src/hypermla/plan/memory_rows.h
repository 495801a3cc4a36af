// Where a tensor [tokens, heads, width] lies, by which outputs are kept apart from inputs.
#pragma once

#include <cstdint>
#include <utility>

namespace hypermla {

struct MemoryRows {
  const char* begin;
  std::int64_t tokens, token_stride, heads, head_stride, width;  // but for the counts in bytes

  std::int64_t row() const { return (heads - 1) * head_stride + width; }  // of a token, first to last head
  std::int64_t all() const { return (tokens - 1) * token_stride + row(); }
  // Without gaps, or with gaps that other heads fill.
  bool is_whole() const { return tokens < 2 || row() >= token_stride; }
};

// Of elements of so many bytes, by which strides and columns count.
inline MemoryRows memory_rows(const void* data, std::int64_t bytes, std::int64_t tokens, std::int64_t token_stride,
                              std::int64_t heads, std::int64_t head_stride, std::int64_t columns) {
  return {static_cast<const char*>(data), tokens, bytes * token_stride, heads, bytes * head_stride, bytes * columns};
}

// Whether the rows of a tensor do not overlap each other. An axis of one may have any stride.
inline bool rows_apart(const MemoryRows& of) {
  std::pair inner(of.token_stride, of.tokens), outer(of.head_stride, of.heads);
  if (outer < inner) std::swap(inner, outer);
  const std::int64_t of_inner = inner.second > 1 ? (inner.second - 1) * inner.first + of.width : of.width;
  return (inner.second <= 1 || inner.first >= of.width) && (outer.second <= 1 || outer.first >= of_inner);
}

// Whether what lies from the first to the last byte of one has bytes of the other.
inline bool spans_overlap(const MemoryRows& a, const MemoryRows& b) {
  return a.begin < b.begin + b.all() && b.begin < a.begin + a.all();
}

// Whether two tensors share bytes. Rows may lie in the gaps of others, as where two tensors take turns in one buffer,
// token by token or head by head; where strides do not tell, they are said to overlap.
inline bool overlap(const MemoryRows& a, const MemoryRows& b) {
  if (!spans_overlap(a, b)) return false;
  if (a.begin == b.begin) return true;
  // By the longer of two strides, which below is the tokens'.
  const auto heads_first = [](const MemoryRows& of) { return of.heads > 1 && of.token_stride < of.head_stride; };
  const auto turned = [](MemoryRows of) {
    std::swap(of.tokens, of.heads);
    std::swap(of.token_stride, of.head_stride);
    return of;
  };
  if (heads_first(a) && heads_first(b)) return overlap(turned(a), turned(b));
  const std::int64_t behind = a.begin - b.begin;  // that a begins so far behind b
  // Columns of the same rows: apart if rows of both are.
  if (a.tokens == b.tokens && a.heads == b.heads && a.token_stride == b.token_stride &&
      a.head_stride == b.head_stride) {
    MemoryRows both = behind < 0 ? a : b;
    const std::int64_t apart = behind < 0 ? -behind : behind, second = behind < 0 ? b.width : a.width;
    const bool follows = apart >= both.width;
    both.width = apart + second;
    if (follows && rows_apart(both)) return false;
  }
  // Of two sequences with one period: does what begins so far behind the other's begin meet it?
  const auto meets = [](std::int64_t behind, std::int64_t own, std::int64_t others, std::int64_t period) {
    behind = (behind % period + period) % period;
    return behind < others || behind + own > period;
  };
  const auto has_period = [](const MemoryRows& of, std::int64_t period) {
    return of.head_stride == period && period >= of.width && (of.tokens < 2 || of.token_stride % period == 0);
  };
  if (has_period(a, b.head_stride) && has_period(b, a.head_stride) && !meets(behind, a.width, b.width, a.head_stride))
    return false;
  if (a.is_whole() && b.is_whole()) return true;
  if (a.is_whole()) return behind < 0 || meets(behind, a.all(), b.row(), b.token_stride);
  if (b.is_whole()) return behind > 0 || meets(-behind, b.all(), a.row(), a.token_stride);
  if (a.token_stride == b.token_stride) return meets(behind, a.row(), b.row(), a.token_stride);
  // Of two periods: each token of the tensor that has fewer of them.
  const MemoryRows &few = a.tokens < b.tokens ? a : b, &many = a.tokens < b.tokens ? b : a;
  for (std::int64_t i = 0; i < few.tokens; ++i) {
    const std::int64_t begin = few.begin + i * few.token_stride - many.begin, first_end = begin - many.row() + 1;
    const std::int64_t next = first_end <= 0 ? 0 : (first_end + many.token_stride - 1) / many.token_stride;
    if (next < many.tokens && next * many.token_stride < begin + few.row()) return true;
  }
  return false;
}

}  // namespace hypermla
