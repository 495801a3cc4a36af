// Tiles of tensors that lie as their owner pleases.
#pragma once

#include "tile.h"

namespace hypermla {

// O x R x N of a tensor [outer, inner, W] that lies by its strides. What does not exist is loaded as a tile behind the
// end of a view, which reads as zeros. A view of 0 rows would not do: on Hopper it becomes a tensor map without an end.
template <int O, int R, int N, int W, class Element>
inline auto strided_view(Element* __restrict__ tensor, int outer, int inner, long long outer_stride,
                         long long inner_stride) {
  constexpr auto dyn = ct::dynamic_extent;
  ct::extents<unsigned, dyn, dyn, W> extents{unsigned(outer), unsigned(inner)};
  ct::strides<unsigned, dyn, dyn, 1> strides{ct::assume_divisible<8>(unsigned(outer_stride)),
                                             ct::assume_divisible<8>(unsigned(inner_stride))};
  return ct::partition_view{
      ct::tensor_span{ct::assume_aligned<16>(tensor), ct::layout_strided_mapping{extents, strides}},
      ct::shape<O, R, N>{}};
}

}  // namespace hypermla
