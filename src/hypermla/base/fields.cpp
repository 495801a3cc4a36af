#include "hypermla/base/fields.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>

#include "hypermla/base/error.h"
#include "hypermla/dtype.h"

namespace hypermla {
namespace {

struct DTypeRow {
  DType dtype;
  std::string_view name;
  int bytes;
};
constexpr std::array<DTypeRow, 4> kDTypes{{
    {DType::bfloat16, "bfloat16", 2},
    {DType::float16, "float16", 2},
    {DType::float32, "float32", 4},
    {DType::int32, "int32", 4},
}};

const DTypeRow& row_of(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row;
  }
  fail("{} is no value of DType; initialise the field with one of its names", static_cast<int>(dtype));
}

const DTypeRow* find_dtype(std::string_view name) {
  for (const DTypeRow& row : kDTypes) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

constexpr std::string_view kDTypeNames = "bfloat16 or float16";  // what kernels compute with

template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

std::string accepts(const FieldRef& field) {
  std::string words;
  for (const auto& [word, value] : field.words) words += fmt::format(", or {}", word);
  const std::string_view type = std::visit(
      Overloaded{[](int*) { return std::string_view("an integer of 32 bits"); },
                 [](bool*) { return std::string_view("true or false"); },
                 [](float*) { return std::string_view("a finite number"); }, [](DType*) { return kDTypeNames; }},
      field.value);
  return std::string(type) + words;
}

// The number that the whole of `text` spells, if it does and T can hold it.
template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

template <class T>
bool assign(T& target, const std::optional<T>& value) {
  if (value) target = *value;
  return value.has_value();
}

std::optional<float> finite(std::optional<double> value) {
  if (!value) return std::nullopt;
  const float narrowed = static_cast<float>(*value);
  return std::isfinite(narrowed) ? std::optional(narrowed) : std::nullopt;
}

std::optional<int> json_int(const Json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  return number<int>(value.dump());  // through its text, so that a number too large for an int is noticed
}

std::optional<int> parse_int(const FieldRef& field, std::string_view text) {
  const std::optional<int> spelled = number<int>(text);
  for (const auto& [word, value] : field.words) {
    if (word == text) return value;
    if (spelled == value) return std::nullopt;  // that is said by the word
  }
  return spelled;
}

std::optional<bool> parse_bool(std::string_view text) {
  if (text == "true" || text == "1") return true;
  if (text == "false" || text == "0") return false;
  return std::nullopt;
}

std::optional<DType> parse_dtype(std::string_view text) {
  const DTypeRow* row = find_dtype(text);
  return row ? std::optional(row->dtype) : std::nullopt;
}

}  // namespace

std::string FieldRef::text() const {
  return std::visit(Overloaded{[](DType* dtype) { return std::string(dtype_name(*dtype)); },
                               [](auto* number) { return fmt::format("{}", *number); }},
                    value);
}

std::string FieldRef::literal() const {
  if (std::holds_alternative<DType*>(value)) return "hypermla::DType::" + text();
  if (!std::holds_alternative<float*>(value)) return text();
  if (!std::isfinite(*std::get<float*>(value))) {
    fail("{} is {}, which C++ source cannot spell; give it a finite number", name, text());
  }
  const std::string digits = text();  // "1" and "1e+20" are not yet and already a floating literal
  return digits + (digits.find_first_of(".e") == std::string::npos ? ".0f" : "f");
}

std::string_view FieldRef::type_name() const {
  constexpr std::array<std::string_view, 4> names{"INT", "BOOL", "FLOAT", "DTYPE"};
  return names[value.index()];
}

Json FieldRef::json() const {
  return std::visit(Overloaded{[](DType* dtype) { return Json(dtype_name(*dtype)); },
                               // The double of the shortest text: 0.1f is written as 0.1, not as 0.10000000149011612.
                               [this](float*) { return Json(number<double>(text()).value_or(std::nan(""))); },
                               [](auto* number) { return Json(*number); }},
                    value);
}

void FieldRef::set(const Json& given) {
  const bool fits = std::visit(
      Overloaded{
          [&](int* target) { return assign(*target, json_int(given)); },
          [&](bool* target) { return given.is_boolean() && assign(*target, std::optional(given.get<bool>())); },
          [&](float* target) { return given.is_number() && assign(*target, finite(given.get<double>())); },
          [&](DType* target) { return given.is_string() && assign(*target, parse_dtype(given.get<std::string>())); }},
      value);
  if (!fits) {
    fail("{} cannot be {}; give it {}", name, given.dump(-1, ' ', false, Json::error_handler_t::replace),
         accepts(*this));
  }
}

void FieldRef::parse(std::string_view user_text) {
  const bool fits =
      std::visit(Overloaded{[&](int* target) { return assign(*target, parse_int(*this, user_text)); },
                            [&](bool* target) { return assign(*target, parse_bool(user_text)); },
                            [&](float* target) { return assign(*target, finite(number<double>(user_text))); },
                            [&](DType* target) { return assign(*target, parse_dtype(user_text)); }},
                 value);
  if (!fits) fail("{} cannot be '{}'; give it {}", name, user_text, accepts(*this));
}

Json to_json(const std::vector<FieldRef>& fields) {
  Json values = Json::object();
  for (const FieldRef& field : fields) values[std::string(field.name)] = field.json();
  return values;
}

void from_json(const std::vector<FieldRef>& fields, const Json& values) {
  if (!values.is_object()) {
    fail("fields are read from a JSON object, not from {}; write {{\"name\": value}}", values.type_name());
  }
  std::vector<std::string> names;
  for (const FieldRef& field : fields) names.emplace_back(field.name);
  for (const auto& [key, value] : values.items()) {
    const auto at = std::find(names.begin(), names.end(), key);
    if (at == names.end()) fail("there is no field '{}'; did you mean '{}'?", key, nearest(key, names));
    FieldRef field = fields[static_cast<std::size_t>(at - names.begin())];
    field.set(value);
  }
}

std::string to_initializer(const std::vector<FieldRef>& fields) {
  std::string text;
  for (const FieldRef& field : fields) {
    text += fmt::format("{}.{} = {}", text.empty() ? "" : ", ", field.name, field.literal());
  }
  return "{" + text + "}";
}

std::string_view dtype_name(DType dtype) { return row_of(dtype).name; }

DType dtype_from_name(std::string_view name) {
  if (const DTypeRow* row = find_dtype(name)) return row->dtype;
  fail("'{}' is not a dtype; use {}", name, kDTypeNames);
}

int dtype_bytes(DType dtype) { return row_of(dtype).bytes; }

}  // namespace hypermla
