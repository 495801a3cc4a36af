// What the latent kernels are given besides where tokens in FP8 may lie in pages.
#pragma once

#include "arguments.h"

namespace hypermla::cute {

struct Fp8Arguments : LatentArguments {
  // Tokens of a page, and places of the pool from a page to the next; 1 and 1 where the table lists tokens.
  Divisor page = {};
  int page_places = 1;
  const float* cache_scale = nullptr;  // [1], of tokens of 576 e4m3: what they are multiplied by
};

}  // namespace hypermla::cute
