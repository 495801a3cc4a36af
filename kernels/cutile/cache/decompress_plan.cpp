#include "cutile/cache/decompress_plan.h"

#include "cutile/cache/decompress_pages.h"
#include "hypermla/plan/executable.h"
#include "hypermla/plan/typed_plan.h"

namespace hypermla {
namespace {

// In the order of the kernels' parameters.
Arguments product_arguments(const MlaCacheOps::Decompress& with, const MlaCacheOps::Decompress::Weights& w,
                            const MlaRows<void>& out) {
  const MlaCache& cache = with.cache;
  return Arguments(cache.latent, with.block_table, w.data, out.data, with.tokens, cache.page, int(cache.pages),
                   cache.latent_page_stride, cache.latent_token_stride, w.head_stride,
                   std::max(w.row_stride, w.column_stride), out.token_stride, out.head_stride);
}
Arguments rope_arguments(const MlaCacheOps::Decompress& with) {
  const MlaCache& cache = with.cache;
  return Arguments(cache.rope, with.block_table, with.k_rope.data, with.tokens, cache.page, int(cache.pages),
                   cache.rope_page_stride, cache.rope_token_stride, with.k_rope.token_stride, with.k_rope.head_stride);
}

}  // namespace

std::vector<KernelSource> PortableDecompress::sources(DType dtype) {
  const auto source = [&](const char* name, const char* of_weights, const Arguments& arguments) {
    return KernelSource{name, "cutile/cache/decompress_pages.cuh",
                        fmt::format("hypermla::{}<hypermla::DType::{}{}>", name, dtype_name(dtype), of_weights),
                        arguments.sizes()};
  };
  const Arguments product = product_arguments({}, {}, {});
  return {source("decompress_pages", ", false", product), source("decompress_pages", ", true", product),
          source("repeat_rope", "", rope_arguments({}))};
}

PortableDecompress::PortableDecompress(DType dtype, Compiler& compiler, Device& device)
    : functions_(load_all(compiler, device, sources(dtype))) {}

void PortableDecompress::run(const MlaCacheOps::Decompress& with, StreamHandle stream) {
  require_32_bit_stride("w_uk.row_stride", with.w_uk.row_stride);
  require_32_bit_stride("w_uk.column_stride", with.w_uk.column_stride);
  require_32_bit_stride("w_uv.row_stride", with.w_uv.row_stride);
  require_32_bit_stride("w_uv.column_stride", with.w_uv.column_stride);
  require_32_bit_stride("k.token_stride", with.k.token_stride);
  require_32_bit_stride("v.token_stride", with.v.token_stride);
  if (with.k_rope.data) require_32_bit_stride("k_rope.token_stride", with.k_rope.token_stride);
  const Grid grid = {ceil_div(with.tokens, kTokensOfBlock), unsigned(with.heads), 1};
  functions_[with.w_uk.column_stride == 1 ? kLatentInnermost : kLatentOuter]->launch(
      grid, product_arguments(with, with.w_uk, with.k).pointers(), stream);
  functions_[with.w_uv.row_stride == 1 ? kLatentInnermost : kLatentOuter]->launch(
      grid, product_arguments(with, with.w_uv, with.v).pointers(), stream);
  if (with.k_rope.data) functions_[kRope]->launch(grid, rope_arguments(with).pointers(), stream);
}

}  // namespace hypermla
