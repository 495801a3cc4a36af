// How a token lies in a cache of latent vectors.
#pragma once

namespace hypermla {

enum class MlaCacheFormat : int {
  as_queries,  // 512 latent and 64 RoPE values in the type of the queries
  // DeepSeek's FP8 form, 656 bytes: 512 e4m3 | 4 fp32 factors, of 128 of these each | 64 bfloat16 for RoPE. A latent
  // value is its e4m3 number times its factor.
  fp8_656,
  fp8_576  // 576 e4m3, 512 and 64 for RoPE, with one factor for all tokens of a layer
};
inline constexpr int kFp8TokenBytes = 656;

// Bytes of a token in FP8; 0 for a cache in the type of the queries.
constexpr int fp8_bytes(MlaCacheFormat format) {
  return format == MlaCacheFormat::fp8_656 ? kFp8TokenBytes : format == MlaCacheFormat::fp8_576 ? 576 : 0;
}

}  // namespace hypermla
