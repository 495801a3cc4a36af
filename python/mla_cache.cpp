// hypermla._hypermla.merge_states, append, decompress_prefix and split_prefixes: include/hypermla/mla_cache.h for
// Python. They take the tensors themselves, as MlaDecode does.
#include "hypermla/mla_cache.h"

#include <map>

#include "extension.h"
#include "hypermla/base/error.h"
#include "tensor_view.h"

namespace {

using hypermla::MlaCacheOps;

// The operations for a tensor's type and device, made when they are first asked for. They live as long as the process.
struct CacheOps {
  MlaCacheOps* ops;
  ElementType type;
  DLDevice device;
};
CacheOps cache_ops_for(const TensorView& tensor, bool bfloat16) {
  const bool gpu = tensor.device.type == kCuda || tensor.device.type == kCudaManaged;
  const DLDevice device = {gpu ? kCuda : kCpu, gpu ? tensor.device.id : 0};
  static auto& made = *new std::map<std::pair<bool, int>, MlaCacheOps>;
  const std::pair<bool, int> key(bfloat16, gpu ? device.id : -1);
  auto found = made.find(key);
  if (found == made.end())
    found = made.emplace(key, MlaCacheOps(bfloat16 ? hypermla::DType::bfloat16 : hypermla::DType::float16,
                                          hypermla::DeviceHandle(gpu ? fmt::format("cuda:{}", device.id) : "cpu")))
                .first;
  return {&found->second, bfloat16 ? ElementType::bfloat16 : ElementType::float16, device};
}
CacheOps cache_ops_for(const char* name, const TensorView& tensor) {
  const bool bfloat16 = tensor.code == kBfloat || tensor.code == kUInt;
  if (tensor.bits != 16 || (!bfloat16 && tensor.code != kFloat))
    hypermla::fail("{} must be of bfloat16 or float16, not {}", name, tensor.said());
  return cache_ops_for(tensor, bfloat16);
}

bool is_true(PyObject* value) {
  const int truth = PyObject_IsTrue(value);
  if (truth < 0) throw PythonError();
  return truth;
}
template <class T>
hypermla::MlaRows<T> rows_of(const TensorView& view, int column = 0) {
  return {reinterpret_cast<T*>(static_cast<char*>(view.data) + 2 * column), view.strides[0], view.strides[1]};
}

// [heads, rows, columns] with the axis last whose elements are dense.
TensorView columns_last(TensorView view) {
  if (view.strides[1] == 1) {
    std::swap(view.strides[1], view.strides[2]);
    std::swap(view.shape[1], view.shape[2]);
  }
  return view;
}

// A tensor of 576 columns, or a pair of 512 and 64: the latent part and the rotary part.
struct LatentAndRope {
  TensorView latent, rope;

  LatentAndRope(const char* name, PyObject* given) {
    const bool pair = PyTuple_Check(given);
    if (pair && PyTuple_Size(given) != 2) hypermla::fail("{} must be a tensor or a pair of two", name);
    names_[0] = pair ? std::string(name) + "[0]" : name;
    names_[1] = pair ? std::string(name) + "[1]" : name;
    latent = view_of(names_[0].c_str(), pair ? PyTuple_GetItem(given, 0) : given);
    rope = pair ? view_of(names_[1].c_str(), PyTuple_GetItem(given, 1)) : latent;
    widths_[0] = pair ? 512 : 576;
    widths_[1] = pair ? 64 : 576;
    if (!pair) rope.data = static_cast<char*>(rope.data) + 2 * 512;
  }
  void require_rows(const CacheOps& of) const {
    require(names_[0].c_str(), latent, of.type, {"tokens", widths_[0]}, of.device);
    require(names_[1].c_str(), rope, of.type, {"tokens", widths_[1]}, of.device);
    require_columns();
  }
  hypermla::MlaCache cache(const CacheOps& of) const {
    if (latent.code == kUInt && latent.bits == 8 && widths_[0] == 576) return fp8_cache(of);
    require(names_[0].c_str(), latent, of.type, {"pages", "page", widths_[0]}, of.device);
    require(names_[1].c_str(), rope, of.type, {latent.shape[0], latent.shape[1], widths_[1]}, of.device);
    require_columns();
    return {.latent = latent.data,
            .rope = rope.data,
            .latent_page_stride = latent.strides[0],
            .latent_token_stride = latent.strides[1],
            .rope_page_stride = rope.strides[0],
            .rope_token_stride = rope.strides[1],
            .pages = latent.shape[0],
            .page = extent("page", latent.shape[1])};
  }

 private:
  hypermla::MlaCache fp8_cache(const CacheOps& of) const {
    using hypermla::MlaCacheFormat;
    const char* name = names_[0].c_str();
    const bool one_factor = latent.ndim == 3 && latent.shape[2] == hypermla::fp8_bytes(MlaCacheFormat::fp8_576);
    const MlaCacheFormat format = one_factor ? MlaCacheFormat::fp8_576 : MlaCacheFormat::fp8_656;
    require(name, latent, ElementType::uint8, {"pages", "page", hypermla::fp8_bytes(format)}, of.device);
    require_dense_columns(name, latent);
    return {.latent = latent.data,
            .latent_page_stride = latent.strides[0],
            .latent_token_stride = latent.strides[1],
            .pages = latent.shape[0],
            .page = extent("page", latent.shape[1]),
            .format = format};
  }
  void require_columns() const {
    require_dense_columns(names_[0].c_str(), latent);
    require_dense_columns(names_[1].c_str(), rope);
  }
  std::string names_[2];
  std::int64_t widths_[2];
};

// merge_states(o_a, lse_a, o_b, lse_b, out, lse, lse_base2, empty_lse_positive, stream or None)
PyObject* cache_merge_states(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (!gets_arguments(given, 9)) return nullptr;
  return guarded([&]() -> PyObject* {
    const TensorView o_a = view_of("o_a", arguments[0]), lse_a = view_of("lse_a", arguments[1]),
                     o_b = view_of("o_b", arguments[2]), lse_b = view_of("lse_b", arguments[3]),
                     out = view_of("out", arguments[4]), lse = view_of("lse", arguments[5]);
    const CacheOps of = cache_ops_for("o_a", o_a);
    require("o_a", o_a, of.type, {"tokens", "heads", "columns"}, of.device);
    const std::int64_t tokens = o_a.shape[0], heads = o_a.shape[1], width = o_a.shape[2];
    require("o_b", o_b, of.type, {tokens, heads, width}, of.device);
    require("out", out, of.type, {tokens, heads, width}, of.device);
    require("lse_a", lse_a, ElementType::float32, {tokens, heads}, of.device);
    require("lse_b", lse_b, ElementType::float32, {tokens, heads}, of.device);
    require("lse", lse, ElementType::float32, {tokens, heads}, of.device);
    require_dense_columns("o_a", o_a);
    require_dense_columns("o_b", o_b);
    require_dense_columns("out", out);
    require_output("out", out);
    require_output("lse", lse);
    of.ops->merge_states({.a = {rows_of<const void>(o_a), rows_of<const float>(lse_a)},
                          .b = {rows_of<const void>(o_b), rows_of<const float>(lse_b)},
                          .o = rows_of<void>(out),
                          .lse = rows_of<float>(lse),
                          .tokens = extent("tokens", tokens),
                          .heads = extent("heads", heads),
                          .width = extent("columns", width),
                          .lse_base2 = is_true(arguments[6]),
                          .empty_lse_positive = is_true(arguments[7])},
                         stream_of(arguments[8], o_a));
    Py_RETURN_NONE;
  });
}

// append(rows or pair, cache or pair, slots, stream or None, cache_scale or None)
PyObject* cache_append(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (!gets_arguments(given, 5)) return nullptr;
  return guarded([&]() -> PyObject* {
    const LatentAndRope rows("rows", arguments[0]), cache("cache", arguments[1]);
    const TensorView slots = view_of("slots", arguments[2]);
    const CacheOps of = cache_ops_for("rows", rows.latent);
    rows.require_rows(of);
    require_output("cache", cache.latent);
    require_output("cache", cache.rope);
    require("slots", slots, ElementType::int64, {"tokens"}, of.device);
    require_dense_columns("slots", slots);
    const std::int64_t there = std::min(rows.latent.shape[0], rows.rope.shape[0]);
    if (slots.shape[0] > there)
      hypermla::fail("there are {} slots for {} rows; give a row for each", slots.shape[0], there);
    of.ops->append({.latent = rows.latent.data,
                    .rope = rows.rope.data,
                    .latent_stride = rows.latent.strides[0],
                    .rope_stride = rows.rope.strides[0],
                    .slots = static_cast<const std::int64_t*>(slots.data),
                    .tokens = extent("tokens", slots.shape[0]),
                    .cache = cache.cache(of),
                    .cache_scale = floats_of("cache_scale", arguments[4], 1, of.device)},
                   stream_of(arguments[3], rows.latent));
    Py_RETURN_NONE;
  });
}

// decompress_prefix(cache or pair, block_table, tokens, w_uk, w_uv, k, v, stream or None)
PyObject* cache_decompress_prefix(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (!gets_arguments(given, 8)) return nullptr;
  return guarded([&]() -> PyObject* {
    const LatentAndRope cache("cache", arguments[0]);
    const TensorView table = view_of("block_table", arguments[1]), uk = view_of("w_uk", arguments[3]),
                     uv = view_of("w_uv", arguments[4]), k = view_of("k", arguments[5]), v = view_of("v", arguments[6]);
    const long long tokens = PyLong_AsLongLong(arguments[2]);
    if (PyErr_Occurred()) throw PythonError();
    const CacheOps of = cache_ops_for("cache", cache.latent);
    const hypermla::MlaCache in = cache.cache(of);
    require("block_table", table, ElementType::int32, {"pages"}, of.device);
    require_dense_columns("block_table", table);
    if (tokens > table.shape[0] * in.page)
      hypermla::fail("block_table has {} pages of {} tokens; the prefix has {}", table.shape[0], in.page, tokens);
    require("w_uk", uk, of.type, {"heads", 128, 512}, of.device);
    const std::int64_t heads = uk.shape[0];
    require("w_uv", uv, of.type, {heads, 512, 128}, of.device);
    const bool rope = k.ndim != 3 || k.shape[2] != 128;
    require("k", k, of.type, {tokens, heads, rope ? 192 : 128}, of.device);
    require("v", v, of.type, {tokens, heads, 128}, of.device);
    require_dense_columns("k", k);
    require_dense_columns("v", v);
    require_output("k", k);
    require_output("v", v);
    const TensorView uk_rows = columns_last(uk), uv_rows = columns_last(uv);
    const TensorView& cache_rope =
        cache.rope.shape[2] == 64 ? cache.rope : cache.latent;  // which is both, if not a pair
    for (const auto& [name, out] : {std::pair("k", &k), {"v", &v}})
      require_apart(name, *out,
                    {{"the cache", &cache.latent}, {"the cache", &cache_rope}, {"w_uk", &uk_rows}, {"w_uv", &uv_rows}});
    of.ops->decompress_prefix({.cache = in,
                               .block_table = static_cast<const int*>(table.data),
                               .tokens = extent("tokens", tokens),
                               .heads = extent("heads", heads),
                               .w_uk = {uk.data, uk.strides[0], uk.strides[1], uk.strides[2]},
                               .w_uv = {uv.data, uv.strides[0], uv.strides[1], uv.strides[2]},
                               .k = rows_of<void>(k),
                               .k_rope = rope ? rows_of<void>(k, 128) : hypermla::MlaRows<void>{},
                               .v = rows_of<void>(v)},
                              stream_of(arguments[7], cache.latent));
    Py_RETURN_NONE;
  });
}

// split_prefixes(block_table, lengths, query_starts, requests, slots, page, prefixes, prefix_pages, owners, found,
// own_table, own_lengths, shared_starts, query_rows, stream or None)
PyObject* cache_split_prefixes(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (!gets_arguments(given, 15)) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto integer = [&](int i) {
      const long value = PyLong_AsLong(arguments[i]);
      if (value == -1 && PyErr_Occurred()) throw PythonError();
      return std::int64_t{value};
    };
    const TensorView table = view_of("block_table", arguments[0]), lengths = view_of("lengths", arguments[1]),
                     starts = view_of("query_starts", arguments[2]), slots = view_of("slots", arguments[4]),
                     prefixes = view_of("prefixes", arguments[6]), pages = view_of("prefix_pages", arguments[7]),
                     owners = view_of("owners", arguments[8]), found = view_of("found", arguments[9]),
                     own_table = view_of("own_table", arguments[10]), own = view_of("own_lengths", arguments[11]),
                     shared = view_of("shared_starts", arguments[12]), rows = view_of("query_rows", arguments[13]);
    const std::int64_t requests = integer(3), page = integer(5);
    const CacheOps of = cache_ops_for(lengths, true);
    const auto take = [&](const char* name, const TensorView& view, std::initializer_list<WantedAxis> shape,
                          ElementType type = ElementType::int32) {
      require(name, view, type, shape, of.device);
      require_dense_columns(name, view);
    };
    take("block_table", table, {"requests", "pages"});
    take("lengths", lengths, {"requests"});
    take("query_starts", starts, {"requests + 1"});
    take("slots", slots, {"tokens"}, ElementType::int64);
    take("prefixes", prefixes, {"prefixes", 4});
    const std::int64_t count = prefixes.shape[0];
    if (count > 1 && prefixes.strides[0] != 4) hypermla::fail("prefixes must be dense");
    take("prefix_pages", pages, {count, "pages"});
    take("owners", owners, {"pages"});
    take("found", found, {"requests"});
    take("own_table", own_table, {"requests", "pages"});
    take("own_lengths", own, {"requests"});
    take("shared_starts", shared, {2, 2 * count});
    take("query_rows", rows, {"queries"});
    for (const auto& [name, view] : {std::pair("prefixes", &prefixes),
                                     {"found", &found},
                                     {"own_table", &own_table},
                                     {"own_lengths", &own},
                                     {"shared_starts", &shared},
                                     {"query_rows", &rows}})
      require_output(name, *view);
    for (const auto& [name, there] : {std::pair("block_table", table.shape[0]),
                                      {"lengths", lengths.shape[0]},
                                      {"query_starts", starts.shape[0] - 1},
                                      {"found", found.shape[0]},
                                      {"own_table", own_table.shape[0]},
                                      {"own_lengths", own.shape[0]}})
      if (requests < 0 || requests > there)
        hypermla::fail("requests={} is not supported: {} has room for 0 to {}", requests, name, there);
    const auto integers = [](const TensorView& view) { return static_cast<int*>(view.data); };
    of.ops->split_prefixes({.block_table = integers(table),
                            .table_stride = table.strides[0],
                            .width = extent("pages", std::min(table.shape[1], own_table.shape[1])),
                            .lengths = integers(lengths),
                            .query_starts = integers(starts),
                            .requests = extent("requests", requests),
                            .slots = static_cast<const std::int64_t*>(slots.data),
                            .tokens = extent("tokens", slots.shape[0]),
                            .page = extent("page", page),
                            .prefixes = static_cast<MlaCacheOps::Prefix*>(prefixes.data),
                            .prefix_pages = integers(pages),
                            .prefix_pages_stride = pages.strides[0],
                            .count = extent("prefixes", count),
                            .owners = static_cast<const unsigned*>(owners.data),
                            .cache_pages = owners.shape[0],
                            .found = static_cast<unsigned*>(found.data),
                            .own_table = integers(own_table),
                            .own_table_stride = own_table.strides[0],
                            .own_lengths = integers(own),
                            .shared_query_starts = integers(shared),
                            .shared_token_starts = integers(shared) + shared.strides[0],
                            .query_rows = integers(rows)},
                           stream_of(arguments[14], lengths));
    Py_RETURN_NONE;
  });
}

PyMethodDef cache_functions[] = {{"merge_states", fast_function(cache_merge_states), METH_FASTCALL, nullptr},
                                 {"append", fast_function(cache_append), METH_FASTCALL, nullptr},
                                 {"decompress_prefix", fast_function(cache_decompress_prefix), METH_FASTCALL, nullptr},
                                 {"split_prefixes", fast_function(cache_split_prefixes), METH_FASTCALL, nullptr},
                                 {}};

}  // namespace

bool add_mla_cache(PyObject* module) {
  return PyModule_AddFunctions(module, cache_functions) == 0 &&
         PyModule_AddIntConstant(module, "MAX_PREFIXES", MlaCacheOps::kMaxPrefixes) == 0;
}
