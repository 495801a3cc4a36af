#include "hypermla/plan/fp8_tokens.h"

#include <cstring>

#include "hypermla/base/error.h"
#include "hypermla/base/half.h"

namespace hypermla {
namespace {

// Of 656 bytes: where its factors and its bfloat16 numbers lie.
constexpr int kFactorsAt = 512, kBfloatsAt = 528, kBfloats = 64;

}  // namespace

void require_cache_format(MlaCacheFormat format) {
  if (format != MlaCacheFormat::as_queries && !fp8_bytes(format))
    fail("{} is no value of MlaCacheFormat: choose as_queries, fp8_656 or fp8_576", int(format));
}

void require_cache_scale(MlaCacheFormat format, const float* cache_scale) {
  const bool has_one = format == MlaCacheFormat::fp8_576;
  if (has_one && !cache_scale) fail("cache_scale is missing: give the address of the factor of the cache");
  if (!has_one && cache_scale) fail("cache_scale has no meaning but for a cache of 576 bytes a token; leave it out");
}

void read_fp8_token(const unsigned char* token, int bytes, float cache_scale, float* numbers) {
  if (bytes == 576) {
    for (int c = 0; c < bytes; ++c) numbers[c] = e4m3_to_float(token[c]) * cache_scale;
    return;
  }
  float factors[4];
  std::memcpy(factors, token + kFactorsAt, sizeof factors);
  for (int c = 0; c < kFactorsAt; ++c) numbers[c] = e4m3_to_float(token[c]) * factors[c / 128];
  for (int c = 0; c < kBfloats; ++c) {
    std::uint16_t bits;
    std::memcpy(&bits, token + kBfloatsAt + 2 * c, 2);
    numbers[kFactorsAt + c] = to_float(bits, DType::bfloat16);
  }
}

void draw_fp8_token(std::mt19937& random, int bytes, float scale, unsigned char* token) {
  const auto e4m3 = [&] { return static_cast<unsigned char>(random() % 0x7f | (random() & 0x80)); };
  if (bytes == 576) {
    for (int c = 0; c < bytes; ++c) token[c] = e4m3_from_float(e4m3_to_float(e4m3()) * scale);
    return;
  }
  for (int c = 0; c < kFactorsAt; ++c) token[c] = e4m3();
  for (int group = 0; group < 4; ++group) {
    const float factor = 0.003f * float(1 + group) * scale;
    std::memcpy(token + kFactorsAt + 4 * group, &factor, 4);
  }
  std::normal_distribution<float> normal;
  for (int c = 0; c < kBfloats; ++c) {
    const std::uint16_t bits = from_float(normal(random) * scale, DType::bfloat16);
    std::memcpy(token + kBfloatsAt + 2 * c, &bits, 2);
  }
}

}  // namespace hypermla
