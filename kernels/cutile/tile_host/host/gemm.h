// The matrix product under mma(): packing, and a micro-kernel that keeps a block of the result in registers.
//
// One operand ("rows") is read one cell at a time and broadcast, straight from row-major memory; the other ("panels")
// is packed so that kLanes of its columns lie side by side. A cell is 32 bits that are multiplied at once: one float,
// or two bfloat16, neighbours along the inner dimension, where the CPU has a dot product for them (AVX512-BF16: twice
// the rate). All else is the same for both, and which operand of mma() becomes rows is its caller's choice.
#pragma once

#include "simd.h"
#include "tile_type.h"

namespace cuda::tiles::host {

using Cell = std::uint32_t;

struct FloatCells {
  static constexpr std::size_t kDepth = 1;  // elements of the inner dimension per cell
  static Floats multiply_add(Floats sum, Words a, Words b) noexcept { return (Floats)a * (Floats)b + sum; }
};

#ifdef __AVX512BF16__
struct PairCells {
  static constexpr std::size_t kDepth = 2;
  static Floats multiply_add(Floats sum, Words a, Words b) noexcept {
    // _mm512_dpbf16_ps, whose header takes a tenth of the time of a kernel's compilation.
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }
};
template <class E, std::size_t inner>
using cells_for = std::conditional_t<std::is_same_v<E, __nv_bfloat16> && inner % 2 == 0, PairCells, FloatCells>;
#else
template <class E, std::size_t inner>
using cells_for = FloatCells;
#endif

// kLanes elements, as floats.
template <class E>
Floats widen(const E* from) noexcept {
  if constexpr (std::is_same_v<E, __nv_bfloat16>) {
    return (Floats)(__builtin_convertvector(load_vector<Shorts>(from), Words) << 16);
  } else if constexpr (sizeof(E) == 4) {
    return load_vector<Floats>(from);
  } else {
    Floats result;
    for (std::size_t i = 0; i < kLanes; ++i) result[i] = from[i];
    return result;
  }
}

// kLanes cells that lie along the inner dimension.
template <class Cells, class E>
Words cells_along(const E* from) noexcept {
  if constexpr (Cells::kDepth == 2) {
    return load_vector<Words>(from);
  } else {
    return (Words)widen(from);
  }
}
// kLanes cells that lie side by side, from kDepth rows of elements.
template <class Cells, class E>
Words cells_across(const E* from, std::size_t row_length) noexcept {
  if constexpr (Cells::kDepth == 2) {
    return __builtin_convertvector(load_vector<Shorts>(from), Words) |
           __builtin_convertvector(load_vector<Shorts>(from + row_length), Words) << 16;
  } else {
    return (Words)widen(from);
  }
}

// Panels of a matrix [inner, columns]: [columns / kLanes][inner / kDepth][kLanes] cells. Two panels at a time, to use
// every byte of a cache line when it is there: the rows may be a power of two apart and evict each other.
template <class Cells, std::size_t inner, std::size_t columns, class E>
void pack_panels(const E* from, Cell* to) noexcept {
  constexpr std::size_t depth = inner / Cells::kDepth, width = columns % (2 * kLanes) == 0 ? 2 : 1;
  for (std::size_t column = 0; column < columns; column += width * kLanes, to += width * depth * kLanes) {
    const E* row = from + column;
    for (std::size_t k = 0; k < depth; ++k, row += Cells::kDepth * columns) {
      for (std::size_t i = 0; i < width; ++i) {
        store_vector(to + (i * depth + k) * kLanes, cells_across<Cells>(row + i * kLanes, columns));
      }
    }
  }
}

// The same panels from the transposed matrix [columns, inner].
template <class Cells, std::size_t inner, std::size_t columns, class E>
void pack_panels_transposed(const E* from, Cell* to) noexcept {
  constexpr std::size_t depth = inner / Cells::kDepth, whole = depth / kLanes * kLanes;
  for (std::size_t column = 0; column < columns; column += kLanes) {
    for (std::size_t k = 0; k < whole; k += kLanes) {
      Words block[kLanes];
#pragma GCC unroll 16
      for (std::size_t i = 0; i < kLanes; ++i) {
        block[i] = cells_along<Cells>(from + (column + i) * inner + k * Cells::kDepth);
      }
      transpose_lanes(block);
#pragma GCC unroll 16
      for (std::size_t i = 0; i < kLanes; ++i) store_vector(to + (column * depth) + (k + i) * kLanes, block[i]);
    }
    for (std::size_t k = whole; k < depth; ++k) {
      for (std::size_t i = 0; i < kLanes; ++i) {
        const E* element = from + (column + i) * inner + k * Cells::kDepth;
        Cell* cell = to + column * depth + k * kLanes + i;
        if constexpr (Cells::kDepth == 2) {
          std::memcpy(cell, element, sizeof(Cell));
        } else {
          *cell = std::bit_cast<Cell>(static_cast<float>(*element));
        }
      }
    }
  }
}

// result[row_count, panel_count * kLanes] (+)= rows * panels, in registers over the whole inner dimension. Sizes are
// template arguments so that each operand is one base register and a constant.
template <class Cells, std::size_t depth, std::size_t row_count, std::size_t panel_count, bool accumulate>
void micro_kernel(const Cell* rows, const Cell* panels, float* result, std::size_t result_stride) {
  Floats sum[row_count][panel_count];
#pragma GCC unroll 16
  for (std::size_t r = 0; r < row_count; ++r) {
#pragma GCC unroll 2
    for (std::size_t p = 0; p < panel_count; ++p) {
      sum[r][p] = accumulate ? load_floats(result + r * result_stride + p * kLanes) : splat(0.0f);
    }
  }
  for (std::size_t k = 0; k < depth; ++k) {
    Words panel[panel_count];
#pragma GCC unroll 2
    for (std::size_t p = 0; p < panel_count; ++p) panel[p] = load_vector<Words>(panels + (p * depth + k) * kLanes);
#pragma GCC unroll 16
    for (std::size_t r = 0; r < row_count; ++r) {
      const Words cell = rows[r * depth + k] - Words{};
#pragma GCC unroll 2
      for (std::size_t p = 0; p < panel_count; ++p) sum[r][p] = Cells::multiply_add(sum[r][p], cell, panel[p]);
    }
  }
#pragma GCC unroll 16
  for (std::size_t r = 0; r < row_count; ++r) {
#pragma GCC unroll 2
    for (std::size_t p = 0; p < panel_count; ++p) {
      store_vector(result + r * result_stride + p * kLanes, sum[r][p]);
    }
  }
}

// result[row_count, columns] (+)= rows[row_count, depth cells] * panels. Half of the vector registers hold sums: enough
// to hide the latency of a multiply-add. Row counts are powers of two, so no block is left over.
template <class Cells, std::size_t depth, std::size_t row_count, std::size_t columns, bool accumulate>
void multiply(const Cell* rows, const Cell* panels, float* result) {
  constexpr std::size_t panel_count = columns % (2 * kLanes) == 0 ? 2 : 1;
  constexpr std::size_t block = std::min(row_count, kVectorRegisters / 2 / panel_count);
  for (std::size_t column = 0; column < columns; column += panel_count * kLanes) {
    for (std::size_t row = 0; row < row_count; row += block) {
      micro_kernel<Cells, depth, block, panel_count, accumulate>(rows + row * depth, panels + column * depth,
                                                                 result + row * columns + column, columns);
    }
  }
}

}  // namespace cuda::tiles::host
