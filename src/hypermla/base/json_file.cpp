#include "hypermla/base/json_file.h"

#include "hypermla/base/files.h"

namespace hypermla {

Json read_json(const std::filesystem::path& path) {
  constexpr int kDeepest = 100;
  bool too_deep = false;
  const auto shallow = [&](int depth, Json::parse_event_t, Json&) {
    too_deep |= depth > kDeepest;
    return depth <= kDeepest;
  };
  Json json = Json::parse(read_file(path), shallow, /*allow_exceptions=*/false);
  return too_deep ? Json(Json::value_t::discarded) : json;
}

}  // namespace hypermla
