// The hybrid on Hopper, one path after the other: the tiling.
#pragma once

namespace hypermla::cute {

struct MlaVar6PlusTiling {
  int latent_rows = 64;
  int parts = 1;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("latent_rows", self.latent_rows, "rows of a latent tile: 64 (flash_mla v0), or 32 and fewer (v1)");
    field("parts", self.parts, "parts into which the tokens of a prefix are cut, to fill the device");
  }
};

}  // namespace hypermla::cute
