// The hybrid on Hopper, both paths at once on multiprocessors of their own: the tiling.
#pragma once

namespace hypermla::cute {

struct MlaVar6PlusV5Tiling {
  int processors = 40;
  int latent_rows = 64;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("processors", self.processors,
          "multiprocessors of the decompressed path; they, or the others, which are latent, are a multiple of 8");
    field("latent_rows", self.latent_rows, "rows of a latent tile: 64 (flash_mla v0), or 32 and fewer (v1)");
  }
};

}  // namespace hypermla::cute
