// A template for reductions in CUDA Tile C++: the root mean square of every row, as RMSNorm needs it.
//
//   hypermla verify-file examples/kernels/reduction_cutile.cu
//   hypermla bench-file examples/kernels/reduction_cutile.cu --Br=8 --Bc=512
//
// A block takes Br rows and walks over their columns, Bc at a time. The sums stay a tile until the end: adding whole
// tiles costs nothing beside the reads, reducing one in every step would. The number of columns is known at compile
// time: only then does the compiler know that every row starts on 16 bytes, and moves tiles by the copy engine (TMA).

#ifdef HYPERMLA_DEVICE

#include "tile.h"

using namespace hypermla;

template <int columns, int Br, int Bc>
[[using cutile: hint(0, occupancy = 4)]] __tile_global__ void root_mean_square(const __nv_bfloat16* __restrict__ x_ptr,
                                                                               float* __restrict__ y_ptr, int rows) {
  constexpr auto dyn = ct::dynamic_extent;
  ct::partition_view x_view{
      ct::tensor_span{ct::assume_aligned<16>(x_ptr), ct::extents<unsigned, dyn, columns>{unsigned(rows)}},
      ct::shape<Br, Bc>{}};
  ct::partition_view y_view{
      ct::tensor_span{ct::assume_aligned<16>(y_ptr), ct::extents<unsigned, dyn, 1>{unsigned(rows)}},
      ct::shape<Br, 1>{}};
  const int m = ct::bid().x;
  auto squares = ct::zeros<ct::tile<float, ct::shape<Br, Bc>>>();  // (Br, Bc)
  for (auto j : ct::irange(0, (columns + Bc - 1) / Bc)) {
    auto x = ct::element_cast<float>(x_view.load_masked(m, j));  // (Br, Bc)
    squares = squares + x * x;                                   // (Br, Bc)
  }
  auto sum = ct::sum(squares, ct::integral_constant<1>{});  // (Br, 1)
  y_view.store_masked(ct::sqrt(sum * (1.0f / float(columns))), m, 0);
}

#else

#include <cmath>

#include "hypermla/kernel_file.h"

using hypermla::DType;

void describe(hypermla::KernelFile& file) {
  const auto rows = file.size("rows", 65536, 333, "tokens");
  const auto columns = file.size("columns", 8192, 1000, "hidden units");
  const auto Br = file.size("Br", 8, 8, "rows of a block, a power of two");
  const auto Bc = file.size("Bc", 512, 512, "columns of a step, a power of two");
  const int x = file.input("x", DType::bfloat16, {rows, columns}, 8);
  const int y = file.output("y", DType::float32, {rows}, 1);
  file.kernel("cutile", "root_mean_square<" + std::to_string(columns) + ", " + std::to_string(Br) + ", " +
                            std::to_string(Bc) + ">");
  file.launch((rows + Br - 1) / Br);
  file.pass(x);
  file.pass(y);
  file.pass_value(static_cast<int>(rows));
  file.work(2.0 * rows * columns, 2.0 * rows * columns + 4.0 * rows);
}

void reference(const hypermla::Row& at) {
  const auto columns = at.size(1);
  const auto x = at.input(0);
  double sum = 0;
  for (std::int64_t j = 0; j < columns; ++j) sum += x[at.row * columns + j] * x[at.row * columns + j];
  at.output(0)[0] = std::sqrt(sum / double(columns));
}

HYPERMLA_KERNEL_FILE(describe, reference)

#endif
