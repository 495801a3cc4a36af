#include "mla/output_decompression/output_decompression_plan.h"

namespace hypermla {

std::vector<TensorSpec> tensors_of(const OutputDecompressionProblem& at) {
  return {{"o_latent", Role::input, at.dtype, {at.b, at.h, at.s, at.k}},
          {"w", Role::input, at.dtype, {at.h, at.k, at.d}},
          {"o", Role::output, at.dtype, {at.b, at.h, at.s, at.d}}};
}

ReferenceShape reference_shape_of(const OutputDecompressionProblem& at) {
  return {std::int64_t{at.b} * at.h, 2.0 * at.s * at.k * at.d};
}

ReferenceOutputs reference_of(const OutputDecompressionProblem& at, std::int64_t group, const InputReader& input) {
  const RowReader rows{input};
  const std::vector<float> latent = rows("o_latent", group, at.s, at.k), w = rows("w", group % at.h, at.k, at.d);
  std::vector<double> o(std::size_t(at.s) * at.d, 0.0);
  for (int i = 0; i < at.s; ++i)
    for (int c = 0; c < at.k; ++c)
      for (int column = 0; column < at.d; ++column)
        o[i * at.d + column] += double(latent[i * at.k + c]) * w[c * at.d + column];
  return {{"o", std::move(o)}};
}

Cost output_decompression_cost(const OutputDecompressionProblem& at) {
  return output_decompression_cost(AttentionShape{
      .b = at.b, .s = at.s, .h = at.h, .d = at.d, .k = at.k, .bytes_per_element = double(dtype_bytes(at.dtype))});
}

}  // namespace hypermla
