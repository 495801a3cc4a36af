// The hybrid on Hopper, one path after the other: the tiling.
#pragma once

namespace hypermla::cute {

struct MlaVar6PlusTiling {
  int latent_version = 0;
  int parts = 1;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("latent_version", self.latent_version, "of flash_mla for the latent tokens: 0, 1, ..");
    field("parts", self.parts, "parts into which the tokens of a prefix are cut, to fill the device");
  }
};

}  // namespace hypermla::cute
