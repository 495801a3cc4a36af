#include "hypermla/profile/csv.h"

namespace hypermla {

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

std::vector<std::vector<std::string>> parse_csv(const std::string& text) {
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> row;
  std::string field;
  bool quoted = false, any = false;
  auto end_row = [&] {
    if (any) {
      row.push_back(field);
      rows.push_back(row);
    }
    row.clear();
    field.clear();
    any = false;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '"' && i + 1 < text.size() && text[i + 1] == '"')
      field += text[++i];
    else if (c == '"')
      quoted = !quoted, any = true;
    else if (quoted)
      field += c;
    else if (c == ',')
      row.push_back(field), field.clear(), any = true;
    else if (c == '\n')
      end_row();
    else if (c != '\r')
      field += c, any = true;
  }
  end_row();
  return rows;
}

}  // namespace hypermla
