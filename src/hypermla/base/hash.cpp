#include "hypermla/base/hash.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cstdint>

namespace hypermla {
namespace {

__extension__ using uint128 = unsigned __int128;

// FIPS 180-4 defines its constants as the first 32 fractional bits of the square and cube roots of the first primes.
// They are computed from that definition, by bisection in integers: the largest x with x^power <= prime * 2^(32 power).
constexpr std::uint32_t fraction_of_root(unsigned prime, int power) {
  const uint128 scaled = uint128{prime} << (32 * power);
  uint128 low = 0, high = uint128{1} << 37;  // the roots themselves are below 2^5
  while (high - low > 1) {
    const uint128 middle = (low + high) / 2;
    const uint128 raised = power == 2 ? middle * middle : middle * middle * middle;
    (raised <= scaled ? low : high) = middle;
  }
  return static_cast<std::uint32_t>(low);
}

template <std::size_t count>
constexpr std::array<std::uint32_t, count> fractions_of_roots(int power) {
  std::array<std::uint32_t, count> fractions{};
  unsigned prime = 1;
  for (std::uint32_t& fraction : fractions) {
    for (bool is_prime = false; !is_prime;) {
      is_prime = true;
      ++prime;
      for (unsigned divisor = 2; divisor * divisor <= prime; ++divisor) is_prime = is_prime && prime % divisor != 0;
    }
    fraction = fraction_of_root(prime, power);
  }
  return fractions;
}

using State = std::array<std::uint32_t, 8>;
constexpr State kInitial = fractions_of_roots<8>(2);
constexpr std::array<std::uint32_t, 64> kRound = fractions_of_roots<64>(3);

// Folds one block of 64 bytes into the state (section 6.2.2).
void compress(State& state, const unsigned char* block) {
  using std::rotr;
  std::array<std::uint32_t, 64> w;
  for (int t = 0; t < 16; ++t, block += 4) {
    w[t] = std::uint32_t{block[0]} << 24 | std::uint32_t{block[1]} << 16 | std::uint32_t{block[2]} << 8 | block[3];
  }
  for (int t = 16; t < 64; ++t) {
    const std::uint32_t s0 = rotr(w[t - 15], 7) ^ rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const std::uint32_t s1 = rotr(w[t - 2], 17) ^ rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = s1 + w[t - 7] + s0 + w[t - 16];
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (int t = 0; t < 64; ++t) {
    const std::uint32_t choose = (e & f) ^ (~e & g), majority = (a & b) ^ (a & c) ^ (b & c);
    const std::uint32_t t1 = h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + choose + kRound[t] + w[t];
    const std::uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + majority;
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const State mixed{a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < state.size(); ++i) state[i] += mixed[i];
}

}  // namespace

std::string content_hash(std::string_view bytes) {
  State state = kInitial;
  const auto* data = reinterpret_cast<const unsigned char*>(bytes.data());
  const std::size_t whole = bytes.size() / 64 * 64;
  for (std::size_t at = 0; at < whole; at += 64) compress(state, data + at);

  // The rest, a one bit, zeros, and the length in bits as 64 bits, most significant byte first.
  std::string tail(bytes.substr(whole));
  tail += '\x80';
  while (tail.size() % 64 != 56) tail += '\0';
  for (int shift = 56; shift >= 0; shift -= 8) tail += static_cast<char>(std::uint64_t{bytes.size()} * 8 >> shift);
  for (std::size_t at = 0; at < tail.size(); at += 64) {
    compress(state, reinterpret_cast<const unsigned char*>(tail.data()) + at);
  }
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", state[0], state[1], state[2], state[3]);
}

}  // namespace hypermla
