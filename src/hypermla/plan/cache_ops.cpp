#include "hypermla/plan/cache_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "hypermla/base/error.h"
#include "hypermla/base/half.h"
#include "hypermla/device/pool.h"
#include "hypermla/plan/fp8_tokens.h"
#include "hypermla/plan/memory_rows.h"
#include "hypermla/plan/typed_plan.h"

namespace hypermla {
namespace {

constexpr int kCachedLatent = 512, kCachedRope = 64, kHeadColumns = 128;

void require_stride(const char* name, std::int64_t stride, int multiple = 8) {
  if (stride <= 0 || stride % multiple)
    fail("{}={} is not supported: it must be a positive multiple of {} elements", name, stride, multiple);
}
template <class T>
void require_rows(const char* name, const MlaRows<T>& rows) {
  constexpr bool is_lse = std::is_same_v<std::remove_const_t<T>, float>;
  require_address(name, rows.data, is_lse ? 4 : 16);
  require_stride(fmt::format("{}.token_stride", name).c_str(), rows.token_stride, is_lse ? 1 : 8);
  require_stride(fmt::format("{}.head_stride", name).c_str(), rows.head_stride, is_lse ? 1 : 8);
}
void require_count(const char* name, std::int64_t count, std::int64_t most) {
  if (count < 0 || count > most) fail("{}={} is not supported: it must be from 0 to {}", name, count, most);
}
void require_cache(const MlaCache& cache) {
  require_cache_format(cache.format);
  require_address("cache.latent", cache.latent);
  if (const int bytes = fp8_bytes(cache.format)) {
    for (const auto& [name, stride] : {std::pair("cache.latent_page_stride", cache.latent_page_stride),
                                       std::pair("cache.latent_token_stride", cache.latent_token_stride)})
      if (stride < bytes || stride % 16)
        fail("{}={} is not supported: tokens of {} bytes are a multiple of 16 bytes apart, and so are their pages",
             name, stride, bytes);
  } else {
    require_address("cache.rope", cache.rope);
    require_stride("cache.latent_page_stride", cache.latent_page_stride);
    require_stride("cache.latent_token_stride", cache.latent_token_stride);
    require_stride("cache.rope_page_stride", cache.rope_page_stride);
    require_stride("cache.rope_token_stride", cache.rope_token_stride);
  }
  if (cache.page < 1 || cache.pages < 1 || cache.pages > std::numeric_limits<int>::max() / cache.page)
    fail("{} pages of {} tokens are not supported: there must be at least one of each, and at most 2^31 - 1 tokens",
         cache.pages, cache.page);
  const auto memory = [&](const char* name, const void* data, std::int64_t bytes, std::int64_t page_stride,
                          std::int64_t token_stride, int width) {
    const MemoryRows rows = memory_rows(data, bytes, cache.page, token_stride, cache.pages, page_stride, width);
    if (!rows_apart(rows))
      fail(
          "cache.{} with a token stride of {} and a page stride of {} is not supported: tokens of {} elements would "
          "overlap",
          name, token_stride, page_stride, width);
    return rows;
  };
  const int of_token = fp8_bytes(cache.format);
  const MemoryRows latent = memory("latent", cache.latent, of_token ? 1 : 2, cache.latent_page_stride,
                                   cache.latent_token_stride, of_token ? of_token : kCachedLatent);
  if (of_token) return;
  if (overlap(latent, memory("rope", cache.rope, 2, cache.rope_page_stride, cache.rope_token_stride, kCachedRope)))
    fail("cache.rope overlaps cache.latent: in rows of both, of {} columns, it begins behind the first {}",
         kCachedLatent + kCachedRope, kCachedLatent);
}

// Where a tensor lies.
template <class T>
MemoryRows memory_of(const MlaRows<T>& rows, const MlaCacheOps::Merge& of) {
  constexpr bool is_lse = std::is_same_v<std::remove_const_t<T>, float>;
  return memory_rows(rows.data, is_lse ? 4 : 2, of.tokens, rows.token_stride, of.heads, rows.head_stride,
                     is_lse ? 1 : of.width);
}

class CacheReference : public CacheKernels {
 public:
  CacheReference(DType dtype, int threads) : dtype_(dtype), threads_(threads) {}

  void merge_states(const MlaCacheOps::Merge& with, StreamHandle) override {
    for_each(std::uint64_t(with.tokens) * with.heads, [&](std::uint64_t row) {
      const std::int64_t token = row / with.heads, head = row % with.heads;
      const auto at = [&](const auto& rows) { return token * rows.token_stride + head * rows.head_stride; };
      const auto* a = static_cast<const std::uint16_t*>(with.a.o.data) + at(with.a.o);
      const auto* b = static_cast<const std::uint16_t*>(with.b.o.data) + at(with.b.o);
      auto* o = static_cast<std::uint16_t*>(with.o.data) + at(with.o);
      constexpr float kNone = -std::numeric_limits<float>::infinity();
      const auto lse_of = [&](const MlaCacheOps::Merge::Part& part) {
        const float lse = part.lse.data[at(part.lse)];
        return std::isinf(lse) ? kNone : lse;
      };
      const float lse_a = lse_of(with.a), lse_b = lse_of(with.b), top = std::max(lse_a, lse_b);
      const float to_log2 = with.lse_base2 ? 1.0f : kLog2e;
      const float a_weighs = lse_a == kNone ? 0.0f : std::exp2((lse_a - top) * to_log2);
      const float b_weighs = lse_b == kNone ? 0.0f : std::exp2((lse_b - top) * to_log2);
      const float sum = a_weighs + b_weighs, share = sum == 0 ? 0.0f : 1 / sum;
      const auto weighted = [&](float weight, std::uint16_t bits) {
        return weight == 0 ? 0.0f : weight * share * to_float(bits, dtype_);
      };
      for (int c = 0; c < with.width; ++c)
        o[c] = from_float(weighted(a_weighs, a[c]) + weighted(b_weighs, b[c]), dtype_);
      if (with.lse.data)
        with.lse.data[at(with.lse)] =
            sum == 0 ? (with.empty_lse_positive ? -kNone : kNone) : top + std::log2(sum) / to_log2;
    });
  }

  void append(const MlaCacheOps::Append& with, StreamHandle) override {
    const MlaCache& cache = with.cache;
    const std::int64_t slots = cache.pages * cache.page;
    if (with.cache_scale && !(*with.cache_scale > 0 && std::isfinite(*with.cache_scale)))
      fail("cache_scale is {}; it must be a positive number", *with.cache_scale);
    for (int i = 0; i < with.tokens; ++i)
      if (with.slots[i] < -1 || with.slots[i] >= slots)
        fail("slots[{}] is {}; the cache has slots 0 to {}, and -1 skips a token", i, with.slots[i], slots - 1);
    for (std::int64_t i = 0; i < with.tokens; ++i) {
      if (with.slots[i] < 0) continue;
      const std::int64_t page = with.slots[i] / cache.page, token = with.slots[i] % cache.page;
      const std::int64_t at = page * cache.latent_page_stride + token * cache.latent_token_stride;
      const auto* latent = static_cast<const std::uint16_t*>(with.latent) + i * with.latent_stride;
      const auto* rope = static_cast<const std::uint16_t*>(with.rope) + i * with.rope_stride;
      if (fp8_bytes(cache.format)) {
        unsigned char* const to = static_cast<unsigned char*>(cache.latent) + at;
        cache.format == MlaCacheFormat::fp8_576 ? store_divided(latent, rope, *with.cache_scale, to)
                                                : store_fp8(latent, rope, to);
        continue;
      }
      std::copy_n(latent, kCachedLatent, static_cast<std::uint16_t*>(cache.latent) + at);
      std::copy_n(
          rope, kCachedRope,
          static_cast<std::uint16_t*>(cache.rope) + page * cache.rope_page_stride + token * cache.rope_token_stride);
    }
  }

  void split_prefixes(const MlaCacheOps::Split& with, StreamHandle) override {
    for (int p = 0; p < with.count; ++p) {
      const MlaCacheOps::Prefix& of = with.prefixes[p];
      if (of.pages < 0 || of.pages > with.prefix_pages_stride)
        fail("prefixes[{}] has {} pages; prefix_pages has room for 0 to {}", p, of.pages, with.prefix_pages_stride);
    }
    for (int i = 0; i < with.tokens && with.count > 0; ++i) {
      const std::int64_t page = with.slots[i] < 0 ? -1 : with.slots[i] / with.page;
      for (int p = 0; p < with.count && page >= 0 && page < with.cache_pages; ++p)
        if (with.owners[page] >> p & 1) with.prefixes[p].valid = 0;
    }
    constexpr unsigned kNone = ~0u;
    std::vector<int> order, queries(with.count);
    for (int r = 0; r < with.requests; ++r) {
      const int* const table = with.block_table + r * with.table_stride;
      const int of_request = with.query_starts[r + 1] - with.query_starts[r];
      int longest = 0;
      with.found[r] = kNone;
      for (int p = 0; p < with.count; ++p) {
        const MlaCacheOps::Prefix& of = with.prefixes[p];
        const int* const pages = with.prefix_pages + p * with.prefix_pages_stride;
        if (of.valid && of.pages > longest && of.pages <= with.width &&
            (with.lengths[r] - of_request) / with.page >= of.pages && std::equal(pages, pages + of.pages, table))
          longest = of.pages, with.found[r] = p;
      }
      if (longest > 0) queries[with.found[r]] += of_request;
    }
    for (int p = 0; p < with.count; ++p) {
      order.push_back(p);
      if (queries[p] < with.prefixes[p].least_queries) queries[p] = 0;
    }
    for (int r = 0; r < with.requests; ++r) {
      const unsigned found = with.found[r];
      const int pages = found != kNone && queries[found] > 0 ? with.prefixes[found].pages : 0;
      const int* const table = with.block_table + r * with.table_stride;
      with.own_lengths[r] = with.lengths[r] - pages * with.page;
      const int end = std::min(pages + (std::max(with.own_lengths[r], 0) + with.page - 1) / with.page, with.width);
      std::copy(table + pages, table + end, with.own_table + r * with.own_table_stride);
    }
    const auto first_token = [&](int p) { return with.prefixes[p].pages ? with.prefixes[p].first_token : -1; };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return first_token(a) < first_token(b); });
    int at = 0;
    for (int i = 0; i < with.count; ++i) {
      const int p = order[i];
      with.shared_query_starts[2 * i] = at;
      for (int r = 0; r < with.requests; ++r)
        if (with.found[r] == unsigned(p) && queries[p] > 0)
          for (int query = with.query_starts[r]; query < with.query_starts[r + 1]; ++query)
            with.query_rows[at++] = query;
      with.shared_query_starts[2 * i + 1] = at;
      with.shared_token_starts[2 * i] = std::max(first_token(p), 0);
      with.shared_token_starts[2 * i + 1] = std::max(first_token(p), 0) + with.prefixes[p].pages * with.page;
    }
  }

  void decompress_prefix(const MlaCacheOps::Decompress& with, StreamHandle) override {
    const MlaCache& cache = with.cache;
    for (int i = 0; i * std::int64_t{cache.page} < with.tokens; ++i)
      if (with.block_table[i] < 0 || with.block_table[i] >= cache.pages)
        fail("block_table[{}] is {}; the cache has {} pages", i, with.block_table[i], cache.pages);
    for_each(with.heads, [&](std::uint64_t head) {
      const std::vector<float> uk = columns_of(with.w_uk, head, true), uv = columns_of(with.w_uv, head, false);
      for (int t = 0; t < with.tokens; ++t) {
        const std::int64_t page = with.block_table[t / cache.page], token = t % cache.page;
        const auto* z = static_cast<const std::uint16_t*>(cache.latent) + page * cache.latent_page_stride +
                        token * cache.latent_token_stride;
        const auto* rope = static_cast<const std::uint16_t*>(cache.rope) + page * cache.rope_page_stride +
                           token * cache.rope_token_stride;
        float values[kCachedLatent];
        for (int c = 0; c < kCachedLatent; ++c) values[c] = to_float(z[c], dtype_);
        const auto row_of = [&](const MlaRows<void>& rows) {
          return static_cast<std::uint16_t*>(rows.data) + t * rows.token_stride + head * rows.head_stride;
        };
        const auto multiply = [&](const std::vector<float>& w, std::uint16_t* to) {
          for (int column = 0; column < kHeadColumns; ++column) {
            float sums[8] = {};
            for (int c = 0; c < kCachedLatent; ++c) sums[c % 8] += values[c] * w[column * kCachedLatent + c];
            float sum = 0;
            for (float one : sums) sum += one;
            to[column] = from_float(sum, dtype_);
          }
        };
        multiply(uk, row_of(with.k));
        multiply(uv, row_of(with.v));
        if (with.k_rope.data) std::copy_n(rope, kCachedRope, row_of(with.k_rope));
      }
    });
  }

 private:
  void for_each(std::uint64_t count, const std::function<void(std::uint64_t)>& work) {
    const std::string error = pool_.run(count, threads_, [&](std::uint64_t i) {
      work(i);
      return nullptr;
    });
    if (!error.empty()) fail("{}", error);
  }
  void store_fp8(const std::uint16_t* latent, const std::uint16_t* rope, unsigned char* token) const {
    constexpr int kGroup = 128, kFactors = kCachedLatent, kRope = kFactors + 4 * kCachedLatent / kGroup;
    for (int first = 0; first < kCachedLatent; first += kGroup) {
      float most = 0;
      for (int c = first; c < first + kGroup; ++c)  // NaN passes by; std::fmax would return a signalling one
        if (const float x = std::abs(to_float(latent[c], dtype_)); x > most) most = x;
      const float factor = std::max(most / 448, std::numeric_limits<float>::min());
      std::memcpy(token + kFactors + 4 * first / kGroup, &factor, sizeof factor);
      for (int c = first; c < first + kGroup; ++c) token[c] = e4m3_from_float(to_float(latent[c], dtype_) / factor);
    }
    for (int c = 0; c < kCachedRope; ++c) {
      const std::uint16_t bits =
          dtype_ == DType::bfloat16 ? rope[c] : from_float(to_float(rope[c], dtype_), DType::bfloat16);
      std::memcpy(token + kRope + 2 * c, &bits, sizeof bits);
    }
  }
  void store_divided(const std::uint16_t* latent, const std::uint16_t* rope, float factor, unsigned char* token) const {
    const auto code = [&](std::uint16_t bits) { return e4m3_from_float(to_float(bits, dtype_) / factor); };
    std::transform(rope, rope + kCachedRope, std::transform(latent, latent + kCachedLatent, token, code), code);
  }
  // [column of the head][latent column]
  std::vector<float> columns_of(const MlaCacheOps::Decompress::Weights& w, std::int64_t head, bool latent_last) const {
    const auto* from = static_cast<const std::uint16_t*>(w.data) + head * w.head_stride;
    std::vector<float> values;
    for (int column = 0; column < kHeadColumns; ++column)
      for (int c = 0; c < kCachedLatent; ++c)
        values.push_back(to_float(
            from[(latent_last ? column : c) * w.row_stride + (latent_last ? c : column) * w.column_stride], dtype_));
    return values;
  }

  DType dtype_;
  int threads_;
  Pool pool_;
};

}  // namespace

MlaCache MlaCache::fused(void* data, std::int64_t pages, int page, MlaCacheFormat format) {
  if (const int bytes = fp8_bytes(format))
    return {.latent = data,
            .latent_page_stride = std::int64_t{page} * bytes,
            .latent_token_stride = bytes,
            .pages = pages,
            .page = page,
            .format = format};
  constexpr int kWidth = kCachedLatent + kCachedRope;
  return {.latent = data,
          .rope = static_cast<std::uint16_t*>(data) + kCachedLatent,
          .latent_page_stride = std::int64_t{page} * kWidth,
          .latent_token_stride = kWidth,
          .rope_page_stride = std::int64_t{page} * kWidth,
          .rope_token_stride = kWidth,
          .pages = pages,
          .page = page};
}

void validate(const MlaCacheOps::Merge& with) {
  require_count("heads", with.heads, 1 << 16);
  require_count("tokens", with.tokens, std::numeric_limits<int>::max() / std::max(with.heads, 1));
  if (with.width < 8 || with.width > 512 || with.width % 8)
    fail("width={} is not supported: it must be a multiple of 8 from 8 to 512", with.width);
  if (with.tokens == 0 || with.heads == 0) return;
  require_rows("a.o", with.a.o);
  require_rows("b.o", with.b.o);
  require_rows("o", with.o);
  require_rows("a.lse", with.a.lse);
  require_rows("b.lse", with.b.lse);
  if (with.lse.data) require_rows("lse", with.lse);
  // What is written is either the same as what is read, element by element, or apart from it.
  const auto apart = [&](const char* name, const auto& out, const char* other, const auto& in) {
    const bool same = static_cast<const void*>(in.data) == out.data && in.token_stride == out.token_stride &&
                      in.head_stride == out.head_stride && std::string_view(name) == other + 2;
    if (!same && spans_overlap(memory_of(out, with), memory_of(in, with)))
      fail("{} overlaps {}: give it memory of its own, or the same address and strides as {}", name, other, other);
  };
  const auto apart_from_parts = [&](const char* name, const auto& out) {
    apart(name, out, "a.o", with.a.o);
    apart(name, out, "b.o", with.b.o);
    apart(name, out, "a.lse", with.a.lse);
    apart(name, out, "b.lse", with.b.lse);
  };
  apart_from_parts("o", with.o);
  if (with.lse.data) {
    apart_from_parts("lse", with.lse);
    if (spans_overlap(memory_of(with.lse, with), memory_of(with.o, with)))
      fail("lse overlaps o: give it memory of its own");
    require_rows_apart("lse", with.tokens, with.lse.token_stride, with.heads, with.lse.head_stride, 1);
  }
  require_rows_apart("o", with.tokens, with.o.token_stride, with.heads, with.o.head_stride, with.width);
}

void validate(const MlaCacheOps::Append& with) {
  require_count("tokens", with.tokens, 1 << 24);
  if (with.tokens == 0) return;
  require_address("latent", with.latent);
  require_address("rope", with.rope);
  require_stride("latent_stride", with.latent_stride);
  require_stride("rope_stride", with.rope_stride);
  require_address("slots", with.slots, 8);
  require_cache(with.cache);
  require_cache_scale(with.cache.format, with.cache_scale);
  if (with.cache_scale) require_address("cache_scale", with.cache_scale, 4);
}

void validate(const MlaCacheOps::Decompress& with) {
  require_count("tokens", with.tokens, 1 << 20);
  require_count("heads", with.heads, 1024);
  if (with.tokens == 0 || with.heads == 0) return;
  if (const int bytes = fp8_bytes(with.cache.format))
    fail("decompress_prefix does not take a cache of {} bytes a token; give it one in 16 bits", bytes);
  require_cache(with.cache);
  require_address("block_table", with.block_table, 4);
  for (const auto& [name, w] : {std::pair("w_uk", &with.w_uk), std::pair("w_uv", &with.w_uv)}) {
    require_address(name, w->data);
    if (w->head_stride <= 0 || w->head_stride % 8 || std::min(w->row_stride, w->column_stride) != 1 ||
        std::max(w->row_stride, w->column_stride) % 8)
      fail(
          "{} with strides of {}, {} and {} elements is not supported: one of the inner two must be 1, and the others "
          "positive multiples of 8",
          name, w->head_stride, w->row_stride, w->column_stride);
  }
  struct Output {
    const char* name;
    const MlaRows<void>& rows;
    int width;
  };
  const Output outputs[] = {
      {"k", with.k, kHeadColumns}, {"v", with.v, kHeadColumns}, {"k_rope", with.k_rope, kCachedRope}};
  const auto memory = [&](const Output& of) {
    return memory_rows(of.rows.data, 2, with.tokens, of.rows.token_stride, with.heads, of.rows.head_stride, of.width);
  };
  for (const Output& one : outputs) {
    if (!one.rows.data && &one.rows == &with.k_rope) continue;
    require_rows(one.name, one.rows);
    require_rows_apart(one.name, with.tokens, one.rows.token_stride, with.heads, one.rows.head_stride, one.width);
    for (const void* input : {static_cast<const void*>(with.cache.latent), static_cast<const void*>(with.cache.rope),
                              with.w_uk.data, with.w_uv.data})
      if (one.rows.data == input)
        fail("{} must have memory of its own: the cache and the weights are read after it is written", one.name);
    for (const Output* before = outputs; before != &one; ++before)
      if (overlap(memory(*before), memory(one)))
        fail("{} overlaps {}: give it memory of its own", one.name, before->name);
  }
}

void validate(const MlaCacheOps::Split& with) {
  require_count("requests", with.requests, 1 << 16);
  require_count("tokens", with.tokens, 1 << 24);
  require_count("count", with.count, MlaCacheOps::kMaxPrefixes);
  if (with.width < 1 || with.page < 1)
    fail("block tables of {} pages of {} tokens are not supported: both must be at least 1", with.width, with.page);
  if (with.requests > 0) {
    require_address("block_table", with.block_table, 4);
    require_address("own_table", with.own_table, 4);
    require_address("lengths", with.lengths, 4);
    require_address("query_starts", with.query_starts, 4);
    require_address("own_lengths", with.own_lengths, 4);
    const auto table = [&](const char* name, const int* data, std::int64_t stride) {
      if (stride < with.width && with.requests > 1)
        fail("{}_stride={} is not supported: a request has {} pages", name, stride, with.width);
      return memory_rows(data, 4, with.requests, stride, 1, 0, with.width);
    };
    if (spans_overlap(table("table", with.block_table, with.table_stride),
                      table("own_table", with.own_table, with.own_table_stride)))
      fail("own_table overlaps block_table: give it memory of its own");
    if (spans_overlap(memory_rows(with.lengths, 4, 1, 0, 1, 0, with.requests),
                      memory_rows(with.own_lengths, 4, 1, 0, 1, 0, with.requests)))
      fail("own_lengths overlaps lengths: give it memory of its own");
  }
  if (with.count == 0) return;
  require_address("prefixes", with.prefixes);
  require_address("prefix_pages", with.prefix_pages, 4);
  if (with.prefix_pages_stride < 1)
    fail("prefix_pages_stride={} is not supported: give the pages that a prefix has at most", with.prefix_pages_stride);
  if (with.requests > 0) {
    require_address("found", with.found, 4);
    require_address("query_rows", with.query_rows, 4);
  }
  require_address("shared_query_starts", with.shared_query_starts, 4);
  require_address("shared_token_starts", with.shared_token_starts, 4);
  if (with.tokens == 0) return;
  require_address("slots", with.slots, 8);
  require_address("owners", with.owners, 4);
  if (with.cache_pages < 1 || with.cache_pages > std::numeric_limits<int>::max())
    fail("cache_pages={} is not supported: it must be from 1 to 2^31 - 1", with.cache_pages);
}

std::unique_ptr<CacheKernels> make_cache_reference(DType dtype, const Device& device) {
  return std::make_unique<CacheReference>(dtype, device.info().processors);
}

}  // namespace hypermla
