// The identity of contents: what names cache entries and proves their files whole.
#pragma once

#include <string>
#include <string_view>

namespace hypermla {

// The first 128 bits of SHA-256 (FIPS 180-4) of `bytes` as 32 lower-case hexadecimal digits: `sha256sum | cut -c-32`.
// A cryptographic hash, because keys made of sources and flags must never collide, and one that every machine has a
// tool for. xxHash and its like are faster, but do not resist collisions; OpenSSL would be one more library to find
// for 90 lines.
std::string content_hash(std::string_view bytes);

}  // namespace hypermla
