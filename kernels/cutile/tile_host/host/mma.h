// mma(a, b, c) = a b + c for tiles [M, K], [K, N], [M, N], or batches of them (rank 3; a batch of 1 repeats).
// Elements bf16, fp16, tf32 or fp32; the accumulator is fp32. With AVX512-BF16 the products of bf16 treat subnormal
// numbers as zero and are added in pairs.
#pragma once

#include "gemm.h"

namespace cuda::tiles {
namespace host {

// A matrix [inner, columns] as panels, from memory that holds it so, or transposed.
template <class Cells, std::size_t inner, std::size_t columns, class E>
void pack(const E* from, bool transposed, Cell* to) {
  if (transposed) {
    pack_panels_transposed<Cells, inner, columns>(from, to);
  } else {
    pack_panels<Cells, inner, columns>(from, to);
  }
}

// A row-major matrix as rows of cells: itself where its elements are such cells, else converted into `memory`.
template <class Cells, std::size_t size, class E>
const Cell* as_rows(const E* from, Buffer& memory) {
  if constexpr (Cells::kDepth * sizeof(E) == sizeof(Cell)) {
    return reinterpret_cast<const Cell*>(from);
  } else {
    memory = Buffer(size * sizeof(Cell));
    Cell* to = static_cast<Cell*>(memory.data());
    constexpr std::size_t whole = size / kLanes * kLanes;
    for (std::size_t i = 0; i < whole; i += kLanes) store_vector(to + i, widen(from + i));
    for (std::size_t i = whole; i < size; ++i) to[i] = std::bit_cast<Cell>(static_cast<float>(from[i]));
    return to;
  }
}

// c[M, N] += t[N, M] transposed; both multiples of kLanes.
template <std::size_t M, std::size_t N>
void add_transposed(const float* t, float* c) {
  for (std::size_t m = 0; m < M; m += kLanes) {
    for (std::size_t n = 0; n < N; n += kLanes) {
      Floats block[kLanes];
#pragma GCC unroll 16
      for (std::size_t i = 0; i < kLanes; ++i) block[i] = load_floats(t + (n + i) * M + m);
      transpose_lanes(block);
#pragma GCC unroll 16
      for (std::size_t i = 0; i < kLanes; ++i) {
        float* row = c + (m + i) * N + n;
        store_vector(row, load_floats(row) + block[i]);
      }
    }
  }
}

// c += a b by the definition, for shapes narrower than a vector.
template <std::size_t M, std::size_t N, std::size_t K, class E>
void multiply_small(const E* a, bool a_swapped, const E* b, bool b_swapped, float* c) {
  for (std::size_t m = 0; m < M; ++m) {
    for (std::size_t n = 0; n < N; ++n) {
      float sum = c[m * N + n];
      for (std::size_t k = 0; k < K; ++k) {
        sum += static_cast<float>(a[a_swapped ? k * M + m : m * K + k]) *
               static_cast<float>(b[b_swapped ? n * K + k : k * N + n]);
      }
      c[m * N + n] = sum;
    }
  }
}

// One product. `a` lies in memory as [M, K], or [K, M] if swapped; `b` as [K, N], or [N, K] if swapped. The operand
// with its inner dimension contiguous becomes rows, so that it needs no packing. When both have it so, as in Q K^T,
// that is the larger one; if it is b, the transposed product is computed and turned when it is added.
template <std::size_t M, std::size_t N, std::size_t K, class E>
void multiply_add(const E* a, bool a_swapped, const E* b, bool b_swapped, float* c) {
  using Cells = cells_for<E, K>;
  constexpr std::size_t depth = K / Cells::kDepth;
  constexpr bool n_fits = N % kLanes == 0, m_fits = M % kLanes == 0 && n_fits;
  Buffer converted;
  if constexpr (m_fits) {
    if (b_swapped && (a_swapped || M <= N)) {
      const Buffer panels(M * depth * sizeof(Cell)), product(M * N * sizeof(float));
      pack<Cells, K, M>(a, !a_swapped, static_cast<Cell*>(panels.data()));
      const Cell* rows = as_rows<Cells, N * K>(b, converted);
      multiply<Cells, depth, N, M, false>(rows, static_cast<Cell*>(panels.data()), static_cast<float*>(product.data()));
      add_transposed<M, N>(static_cast<float*>(product.data()), c);
      return;
    }
  }
  if constexpr (n_fits) {
    if (!a_swapped) {
      const Buffer panels(N * depth * sizeof(Cell));
      pack<Cells, K, N>(b, b_swapped, static_cast<Cell*>(panels.data()));
      const Cell* rows = as_rows<Cells, M * K>(a, converted);
      multiply<Cells, depth, M, N, true>(rows, static_cast<Cell*>(panels.data()), c);
      return;
    }
  }
  multiply_small<M, N, K>(a, a_swapped, b, b_swapped, c);
}

}  // namespace host

template <class E, class A, class B, class S>
tile<float, S> mma(tile<E, A> a, tile<E, B> b, tile<float, S> c) {
  constexpr std::size_t rank = S::rank();
  static_assert((rank == 2 || rank == 3) && A::rank() == rank && B::rank() == rank,
                "mma takes three tiles of rank 2 or 3");
  static_assert(host::is_float<E> && !std::is_same_v<E, double>, "mma on a CPU multiplies bf16, fp16, tf32 or fp32");
  constexpr std::size_t M = S::static_extent(rank - 2), N = S::static_extent(rank - 1), K = A::static_extent(rank - 1);
  static_assert(A::static_extent(rank - 2) == M && B::static_extent(rank - 2) == K && B::static_extent(rank - 1) == N,
                "mma takes [M, K], [K, N] and [M, N]");
  constexpr std::size_t batch = rank == 3 ? S::static_extent(0) : 1;
  constexpr std::size_t a_step = rank == 3 && A::static_extent(0) > 1 ? M * K : 0;
  constexpr std::size_t b_step = rank == 3 && B::static_extent(0) > 1 ? K * N : 0;
  c = std::move(c).take();
  // Two swapped operands make a swapped product, which is taken as it is; a alone is turned first.
  if (a.swapped() && !b.swapped()) a = a.dense();
  for (std::size_t i = 0; i < batch; ++i) {
    host::multiply_add<M, N, K>(a.data() + i * a_step, a.swapped(), b.data() + i * b_step, b.swapped(),
                                c.data() + i * M * N);
  }
  return c;
}

}  // namespace cuda::tiles
