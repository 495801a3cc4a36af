// Tokens of a cache in FP8 (include/hypermla/mla_cache_format.h), of 656 or 576 bytes, on the host.
#pragma once

#include <random>

#include "hypermla/mla_cache_format.h"

namespace hypermla {

// Throws Error for a number that names no format.
void require_cache_format(MlaCacheFormat format);

// Throws Error unless the factor of the whole cache is given exactly where the format has one.
void require_cache_scale(MlaCacheFormat format, const float* cache_scale);

// The 576 numbers that a token stands for. `cache_scale`: the factor of tokens of 576 bytes.
void read_fp8_token(const unsigned char* token, int bytes, float cache_scale, float* numbers);

// A token of any e4m3 numbers but NaN, times `scale`, which for 576 bytes is at most 1.
void draw_fp8_token(std::mt19937& random, int bytes, float scale, unsigned char* token);

}  // namespace hypermla
