// What the host and the device know alike of decompress_pages.cuh.
#pragma once

namespace hypermla {

inline constexpr int kTokensOfBlock = 64;

}  // namespace hypermla
