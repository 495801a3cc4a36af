// How a token lies in a cache of latent vectors.
#pragma once

namespace hypermla {

enum class MlaCacheFormat : int {
  as_queries,  // 512 latent and 64 RoPE values in the type of the queries
  // DeepSeek's FP8 form, 656 bytes: 512 e4m3 | 4 fp32 factors, of 128 of these each | 64 bfloat16 for RoPE. A latent
  // value is its e4m3 number times its factor.
  fp8_656
};
inline constexpr int kFp8TokenBytes = 656;

}  // namespace hypermla
