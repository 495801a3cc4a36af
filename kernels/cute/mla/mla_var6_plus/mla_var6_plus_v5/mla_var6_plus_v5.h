// The hybrid on Hopper, both paths at once on multiprocessors of their own: the tiling.
#pragma once

namespace hypermla::cute {

struct MlaVar6PlusV5Tiling {
  int processors = 40;
  int latent_version = 0;
  int decompressed_version = 0;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("processors", self.processors,
          "multiprocessors of the decompressed path; they, or the others, which are latent, are a multiple of 8");
    field("latent_version", self.latent_version, "of flash_mla for the latent tokens: 0, 1, ..");
    field("decompressed_version", self.decompressed_version,
          "of flash_attention for the decompressed tokens: 0, 1, ..");
  }
};

}  // namespace hypermla::cute
