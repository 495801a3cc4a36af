// A template for elementwise kernels in CUDA Tile C++: y = silu(gate) * up, the activation of gated feed-forward
// layers.
//
//   hypermla verify-file examples/kernels/elementwise_cutile.cu
//   hypermla bench-file examples/kernels/elementwise_cutile.cu --Br=4 --Bc=1024
//
// A block takes one tile of Br rows and Bc columns. The number of columns is known at compile time: only then does the
// compiler know that every row starts on 16 bytes, and moves tiles by the copy engine (TMA) or in its widest loads.

#ifdef HYPERMLA_DEVICE

#include "tile.h"

using namespace hypermla;

template <int columns, int Br, int Bc>
[[using cutile: hint(0, occupancy = 4)]] __tile_global__ void silu_product(const __nv_bfloat16* __restrict__ gate_ptr,
                                                                           const __nv_bfloat16* __restrict__ up_ptr,
                                                                           __nv_bfloat16* __restrict__ y_ptr,
                                                                           int rows) {
  ct::extents<unsigned, ct::dynamic_extent, columns> extents{unsigned(rows)};
  ct::partition_view gates{ct::tensor_span{ct::assume_aligned<16>(gate_ptr), extents}, ct::shape<Br, Bc>{}};
  ct::partition_view ups{ct::tensor_span{ct::assume_aligned<16>(up_ptr), extents}, ct::shape<Br, Bc>{}};
  ct::partition_view outputs{ct::tensor_span{ct::assume_aligned<16>(y_ptr), extents}, ct::shape<Br, Bc>{}};
  constexpr int kAcross = (columns + Bc - 1) / Bc;  // tiles in a row of tiles
  const int i = ct::bid().x / kAcross, j = ct::bid().x % kAcross;
  auto gate = ct::element_cast<float>(gates.load_masked(i, j));  // (Br, Bc)
  auto up = ct::element_cast<float>(ups.load_masked(i, j));      // (Br, Bc)
  auto y = gate * up / (ct::exp2(gate * -kLog2e) + 1.0f);        // (Br, Bc)
  outputs.store_masked(ct::element_cast<__nv_bfloat16>(y), i, j);
}

#else

#include <cmath>

#include "hypermla/kernel_file.h"

using hypermla::DType;

void describe(hypermla::KernelFile& file) {
  const auto rows = file.size("rows", 65536, 333, "tokens");
  const auto columns = file.size("columns", 4096, 1000, "hidden units");
  const auto Br = file.size("Br", 4, 4, "rows of a tile, a power of two");
  const auto Bc = file.size("Bc", 1024, 512, "columns of a tile, a power of two");
  const int gate = file.input("gate", DType::bfloat16, {rows, columns}, 8);
  const int up = file.input("up", DType::bfloat16, {rows, columns}, 8);
  const int y = file.output("y", DType::bfloat16, {rows, columns}, 8);
  file.kernel("cutile",
              "silu_product<" + std::to_string(columns) + ", " + std::to_string(Br) + ", " + std::to_string(Bc) + ">");
  file.launch((columns + Bc - 1) / Bc * ((rows + Br - 1) / Br));
  file.pass(gate);
  file.pass(up);
  file.pass(y);
  file.pass_value(static_cast<int>(rows));
  file.work(5.0 * rows * columns, 6.0 * rows * columns);
}

void reference(const hypermla::Row& at) {
  const auto columns = at.size(1);
  const auto gate = at.input(0), up = at.input(1);
  for (std::int64_t j = 0; j < columns; ++j) {
    const double x = gate[at.row * columns + j];
    at.output(0)[j] = x / (1 + std::exp(-x)) * up[at.row * columns + j];
  }
}

HYPERMLA_KERNEL_FILE(describe, reference)

#endif
