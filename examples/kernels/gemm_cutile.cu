// A template for matrix products in CUDA Tile C++: c = a b^T, as in a linear layer, where b [n, k] is the weight.
//
//   hypermla verify-file examples/kernels/gemm_cutile.cu
//   hypermla bench-file examples/kernels/gemm_cutile.cu --Bm=128 --Bn=256
//
// A block makes one tile (Bm, Bn) of c. Tiles are numbered so that blocks that run at the same time lie in a square:
// they read few different rows of a and b, which stay in L2. n and k are known at compile time: only then does the
// compiler know that every row starts on 16 bytes, and moves tiles by the copy engine (TMA).

#ifdef HYPERMLA_DEVICE

#include "tile.h"

using namespace hypermla;

template <int n, int k, int Bm, int Bn, int Bk, int warps>
[[using cutile: hint(0, occupancy = 1, num_worker_warps_per_cta = warps)]] __tile_global__ void gemm(
    const __nv_bfloat16* __restrict__ a_ptr, const __nv_bfloat16* __restrict__ b_ptr, __nv_bfloat16* __restrict__ c_ptr,
    int m, int most) {
  constexpr auto dyn = ct::dynamic_extent;
  ct::partition_view a_view{ct::tensor_span{ct::assume_aligned<16>(a_ptr), ct::extents<unsigned, dyn, k>{unsigned(m)}},
                            ct::shape<Bm, Bk>{}};
  ct::partition_view b_view{ct::tensor_span{ct::assume_aligned<16>(b_ptr), ct::extents<unsigned, dyn, k>{unsigned(n)}},
                            ct::shape<Bn, Bk>{}};
  ct::partition_view c_view{ct::tensor_span{ct::assume_aligned<16>(c_ptr), ct::extents<unsigned, dyn, n>{unsigned(m)}},
                            ct::shape<Bm, Bn>{}};
  const int tiles_m = (m + Bm - 1) / Bm, tiles_n = (n + Bn - 1) / Bn;
  // Band by band of `most` rows of tiles.
  const int band = int(ct::bid().x) / (most * tiles_n), within = int(ct::bid().x) % (most * tiles_n);
  const int side = tiles_m - band * most < most ? tiles_m - band * most : most;
  const int row = band * most + within % side, column = within / side;

  auto sum = ct::zeros<ct::tile<float, ct::shape<Bm, Bn>>>();  // (Bm, Bn)
  for (auto step : ct::irange(0, (k + Bk - 1) / Bk)) {
    auto a = a_view.load_masked(row, step);     // (Bm, Bk)
    auto b = b_view.load_masked(column, step);  // (Bn, Bk)
    sum = ct::mma(a, ct::transpose(b), sum);    // (Bm, Bn)
  }
  c_view.store_masked(ct::element_cast<__nv_bfloat16>(sum), row, column);
}

#else

#include "hypermla/kernel_file.h"

using hypermla::DType;

void describe(hypermla::KernelFile& file) {
  const auto m = file.size("m", 8192, 203, "rows of a and c");
  const auto n = file.size("n", 8192, 328, "rows of b, columns of c");
  const auto k = file.size("k", 8192, 136, "columns of a and b");
  const auto Bm = file.size("Bm", 128, 64, "rows of a tile, a power of two");
  const auto Bn = file.size("Bn", 256, 64, "columns of a tile, a power of two");
  const auto Bk = file.size("Bk", 64, 64, "columns of a step, a power of two");
  const auto warps = file.size("warps", 8, 8, "warps of a block that compute");
  const auto side = file.size("side", 16, 2, "rows of tiles that are walked together");
  const int a = file.input("a", DType::bfloat16, {m, k}, 8);
  const int b = file.input("b", DType::bfloat16, {n, k}, 8);
  const int c = file.output("c", DType::bfloat16, {m, n}, 8);
  file.kernel("cutile", "gemm<" + std::to_string(n) + ", " + std::to_string(k) + ", " + std::to_string(Bm) + ", " +
                            std::to_string(Bn) + ", " + std::to_string(Bk) + ", " + std::to_string(warps) + ">");
  file.launch((m + Bm - 1) / Bm * ((n + Bn - 1) / Bn));
  file.pass(a);
  file.pass(b);
  file.pass(c);
  file.pass_value(static_cast<int>(m));
  file.pass_value(static_cast<int>(side));
  file.work(2.0 * m * n * k, 2.0 * (m * k + n * k + m * n));
}

void reference(const hypermla::Row& at) {
  const auto n = at.size(1), k = at.size(2);
  const auto a = at.input(0), b = at.input(1);
  for (std::int64_t j = 0; j < n; ++j) {
    double sum = 0;
    for (std::int64_t i = 0; i < k; ++i) sum += a[at.row * k + i] * b[j * k + i];
    at.output(0)[j] = sum;
  }
}

HYPERMLA_KERNEL_FILE(describe, reference)

#endif
