// Decompression of the latent outputs of FlashMLA: one matrix product per head (the value half of the up-projection of
// DeepSeek-V2, arXiv 2405.04434), written with CUTLASS 4.2: its layouts, its matrix atom, its pipeline. What was
// learned from which of its examples: docs/learning/cute.md.
//
// The matrix of a head stays in shared memory while a thread block walks over tiles of 64 rows. A row is a query of a
// batch element: Bb batch elements times Bs queries make a tile, one box of the copy engine.
//
// Roles (160 threads):
//   warps 0..3   (a warpgroup) multiply, and send the outputs
//   warp 4       one thread loads the matrix, 64 latent columns at a time, and the rows, in a ring of `stages` boxes
//
// grid = (blocks per head, h); output_decompression_shared_bytes() of dynamic shared memory.
#pragma once

#if !__has_include(<cute/tensor.hpp>)
#error \
    "the headers of CUTLASS 4.2 were not found: run ./hypermla once, or pip install --no-deps nvidia-cutlass==4.2.0.0"
#endif

#define NDEBUG  // or CUTLASS checks roles at run time, with traps
#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>

#include <cute/tensor.hpp>
#include <cutlass/pipeline/sm90_pipeline.hpp>

#include "hopper/tma.h"
#include "output_decompression.h"

namespace hypermla::cute {

namespace ct = ::cute;  // CUTLASS' own namespace of that name

template <OutputDecompressionProblem problem, OutputDecompressionTiling tiling>
struct OutputDecompressionTypes {
  static constexpr int kRows = kOutputDecompressionRows, kColumns = problem.d, kStep = 64;
  using Element = ct::conditional_t<problem.dtype == DType::float16, cutlass::half_t, cutlass::bfloat16_t>;
  using Rows = ct::Int<kRows>;
  using Columns = ct::Int<kColumns>;
  using Step = ct::Int<kStep>;
  using Steps = ct::Int<problem.k / kStep>;

  // wgmma reads both operands from shared memory: rows along k, as they lie in memory, the matrix along its columns.
  using Multiply =
      decltype(ct::make_tiled_mma(ct::GMMA::ss_op_selector<Element, Element, float, ct::Shape<Rows, Columns, Step>,
                                                           ct::GMMA::Major::K, ct::GMMA::Major::MN>()));

  // As the copy engine leaves boxes with 128-byte swizzle: 64 elements are a line, 8 lines an atom, and the lines of
  // a box follow each other before the next 64 columns begin.
  using RowsLayout = decltype(ct::tile_to_shape(ct::GMMA::Layout_K_SW128_Atom<Element>{},
                                                ct::Shape<Rows, Step, ct::Int<tiling.stages>>{}));  // (row, k, stage)
  using MatrixLayout =
      decltype(ct::tile_to_shape(ct::GMMA::Layout_MN_SW128_Atom<Element>{}, ct::Shape<Columns, Step, Steps>{},
                                 ct::Step<ct::_2, ct::_1, ct::_3>{}));  // (column, k, step)
  using OutLayout = decltype(ct::tile_to_shape(ct::GMMA::Layout_K_SW128_Atom<Element>{},
                                               ct::Shape<Rows, Columns>{}));  // (row, column)

  using Pipeline = cutlass::PipelineTmaAsync<tiling.stages>;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;

  struct Shared {
    alignas(1024) ct::array_aligned<Element, ct::cosize_v<MatrixLayout>> matrix;
    alignas(1024) ct::array_aligned<Element, ct::cosize_v<RowsLayout>> rows;
    alignas(1024) ct::array_aligned<Element, ct::cosize_v<OutLayout>> out;
    alignas(16) typename Pipeline::SharedStorage pipeline;
    Barrier matrix_full[problem.k / kStep];
  };
  static_assert(sizeof(Shared) + 1024 <= output_decompression_shared_bytes(problem.k, problem.d, tiling.stages));
};

template <OutputDecompressionProblem problem, OutputDecompressionTiling tiling>
__global__ void __launch_bounds__(160) output_decompression(const __grid_constant__ OutputDecompressionArguments with) {
  const int tiles = with.tiles, query_tiles = with.query_tiles, Bs = with.Bs;
  using Types = OutputDecompressionTypes<problem, tiling>;
  using Element = typename Types::Element;
  using Pipeline = typename Types::Pipeline;
  constexpr int kMathThreads = 128, kSteps = Types::Steps::value, kRows = Types::kRows;
  constexpr unsigned kBoxBytes = kRows * Types::kStep * sizeof(Element);
  constexpr unsigned kMatrixBytes = Types::kColumns * Types::kStep * sizeof(Element);  // of a step
  constexpr auto kNormal = static_cast<ct::uint64_t>(ct::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr auto kOnce = static_cast<ct::uint64_t>(ct::TMA::CacheHintSm90::EVICT_FIRST);

  extern __shared__ unsigned char dynamic[];
  auto& shared = *reinterpret_cast<typename Types::Shared*>(dynamic + (-shared_address(dynamic) & 1023));
  const int head = blockIdx.y, thread = threadIdx.x;
  const bool loads = thread >= kMathThreads;

  if (thread == 0)
    for (auto& barrier : shared.matrix_full) barrier.init(1);
  typename Pipeline::Params roles;
  roles.transaction_bytes = kBoxBytes;
  roles.role = loads ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
  roles.is_leader = thread == kMathThreads;
  roles.num_consumers = kMathThreads;
  Pipeline pipeline(shared.pipeline, roles, ct::Shape<ct::_1, ct::_1, ct::_1>{});  // its fence covers matrix_full too
  __syncthreads();

  if (loads) {
    if (thread != kMathThreads) return;
    auto at = cutlass::make_producer_start_state<Pipeline>();
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const int query = tile % query_tiles * Bs, batch = tile / query_tiles * (kRows / Bs);
      for (int step = 0; step < kSteps; ++step, ++at) {
        if (tile == static_cast<int>(blockIdx.x)) {
          shared.matrix_full[step].arrive_and_expect_tx(kMatrixBytes);
          ct::SM90_TMA_LOAD_4D::copy(&with.w_map, reinterpret_cast<ct::uint64_t*>(&shared.matrix_full[step]), kNormal,
                                     shared.matrix.data() + step * Types::kColumns * Types::kStep, 0,
                                     step * Types::kStep, 0, head);
        }
        pipeline.producer_acquire(at);
        ct::SM90_TMA_LOAD_5D::copy(&with.o_latent_map, pipeline.producer_get_barrier(at), kOnce,
                                   shared.rows.data() + at.index() * kRows * Types::kStep, 0, query, batch, step, head);
      }
    }
    return;
  }

  auto rows = ct::make_tensor(ct::make_smem_ptr(shared.rows.data()), typename Types::RowsLayout{});
  auto matrix = ct::make_tensor(ct::make_smem_ptr(shared.matrix.data()), typename Types::MatrixLayout{});
  auto out = ct::make_tensor(ct::make_smem_ptr(shared.out.data()), typename Types::OutLayout{});

  typename Types::Multiply multiply;
  auto mine = multiply.get_thread_slice(thread);
  auto a = mine.make_fragment_A(mine.partition_A(rows));    // descriptors (1, 1, k16, stage)
  auto b = mine.make_fragment_B(mine.partition_B(matrix));  // descriptors (1, 1, k16, step)
  auto acc = ct::partition_fragment_C(multiply, ct::Shape<typename Types::Rows, typename Types::Columns>{});
  auto rounded = ct::make_fragment_like<Element>(acc);

  auto to_shared = ct::make_tiled_copy_C(ct::Copy_Atom<ct::SM90_U32x4_STSM_N, Element>{}, multiply);
  auto my_copy = to_shared.get_thread_slice(thread);
  auto from = my_copy.retile_S(rounded);
  auto to = my_copy.partition_D(out);
  auto meet = [] { cutlass::arch::NamedBarrier::sync(kMathThreads, 0); };  // the first that CUTLASS leaves to users

  typename Pipeline::PipelineState read, done;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    ct::warpgroup_fence_operand(acc);
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kSteps; ++step, ++read) {
      shared.matrix_full[step].wait(0);  // passed at once from the second tile on
      pipeline.consumer_wait(read);
      ct::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < ct::size<2>(a); ++k) {
        multiply.accumulate_ = step == 0 && k == 0 ? ct::GMMA::ScaleOut::Zero : ct::GMMA::ScaleOut::One;
        ct::gemm(multiply, a(ct::_, ct::_, k, read.index()), b(ct::_, ct::_, k, step), acc);
      }
      ct::warpgroup_commit_batch();
      if (step == 0) continue;
      ct::warpgroup_wait<1>();  // the products of the step before have read their box
      pipeline.consumer_release(done);
      ++done;
    }
    ct::warpgroup_wait<0>();
    ct::warpgroup_fence_operand(acc);
    pipeline.consumer_release(done);
    ++done;

    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < ct::size(acc); ++i) rounded(i) = Element(acc(i));
    if (thread == 0) ct::tma_store_wait<0>();  // the outputs before these have left
    meet();
    ct::copy(to_shared, from, to);
    ct::tma_store_fence();
    meet();
    if (thread == 0) {
      ct::SM90_TMA_STORE_5D::copy(&with.o_map, shared.out.data(), 0, tile % query_tiles * Bs,
                                  tile / query_tiles * (kRows / Bs), 0, head);
      ct::tma_store_arrive();
    }
  }
  if (thread == 0) ct::tma_store_wait<0>();  // shared memory lives until it has been read
}

}  // namespace hypermla::cute
