// A struct lists its fields once, and flags, help, JSON, cache keys and template arguments are all made from that list:
//
//   struct FlashAttentionTiling {
//     int Bm = 64;
//     int Bn = 64;
//     template <class Self, class Visitor>
//     static constexpr void fields(Self& self, Visitor&& field) {
//       field("Bm", self.Bm, "query rows of one block");
//       field("Bn", self.Bn, "tokens of one step");
//     }
//   };
//
// Such structs hold only int, bool, float and DType members, so they are structural types: a kernel takes them as
// template arguments. They are read by the device compilers too and therefore include nothing but hypermla/dtype.h.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "hypermla/dtype.h"

namespace hypermla {

// JSON that keeps the order in which keys were written: files read like the struct.
using Json = nlohmann::ordered_json;

// One field of one object: its name, what it means, and where it lives. Valid as long as the object is.
struct FieldRef {
  std::string_view name;
  std::string_view help;
  std::variant<int*, bool*, float*, DType*> value;
  // Words that a user may type for some values of an integer: n=roofline.
  std::vector<std::pair<std::string_view, int>> words = {};

  std::string text() const;            // as a user types it: 64, true, 0.5, bfloat16
  std::string literal() const;         // as C++ source: 64, true, 0.5f, hypermla::DType::bfloat16
  std::string_view type_name() const;  // INT, BOOL, FLOAT, DTYPE: for --help
  Json json() const;
  void set(const Json& value);             // throws Error naming the field when the type does not fit
  void parse(std::string_view user_text);  // throws Error naming the field and what it accepts
};

template <class T>
std::vector<FieldRef> fields_of(T& object) {
  std::vector<FieldRef> refs;
  T::fields(object, [&](std::string_view name, auto& value, std::string_view help) {
    refs.push_back({name, help, &value});
  });
  return refs;
}

Json to_json(const std::vector<FieldRef>& fields);
// Sets the fields that `values` names. An unknown key throws an Error that names the nearest field.
void from_json(const std::vector<FieldRef>& fields, const Json& values);
// "{.Bm = 64, .Bn = 64}": designated initialisers, for generated source.
std::string to_initializer(const std::vector<FieldRef>& fields);

template <class T>
Json fields_json(const T& object) {
  T copy = object;
  return to_json(fields_of(copy));
}
template <class T>
T fields_from_json(const Json& values, T object = {}) {
  from_json(fields_of(object), values);
  return object;
}
template <class T>
std::string fields_initializer(const T& object) {
  T copy = object;
  return to_initializer(fields_of(copy));
}

std::string_view dtype_name(DType dtype);
DType dtype_from_name(std::string_view name);  // throws Error listing the names
int dtype_bytes(DType dtype);

}  // namespace hypermla
