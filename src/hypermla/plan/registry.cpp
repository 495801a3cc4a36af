#include "hypermla/plan/registry.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>

namespace hypermla {
namespace {

int version_number(const KernelEntry& entry) { return std::stoi(entry.version.substr(1)); }

std::string underscored(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// The directory of a kernel below the kernel root, part by part: language, layer, design, version.
std::array<std::string, 4> directory_parts(const std::string& source_file) {
  std::vector<std::string> parts;
  for (const auto& part : std::filesystem::path(source_file).parent_path()) parts.push_back(part.string());
  const std::size_t size = parts.size();
  if (size < 5 || parts[size - 5] != "kernels")
    fail("{} does not lie in kernels/<language>/<layer>/<design>/<version>/", source_file);
  return {parts[size - 4], parts[size - 3], parts[size - 2], parts[size - 1]};
}

}  // namespace

std::string beside(const std::string& source_file, const std::string& name) {
  return fmt::format("{}/{}", fmt::join(directory_parts(source_file), "/"), name);
}

Registry& Registry::instance() {
  static Registry registry;
  return registry;
}

std::string version_in(const std::string& directory, const std::string& design) {
  if (directory == design) return "v0";
  if (!directory.starts_with(design + "_v")) return "";
  const std::string number = directory.substr(design.size() + 2);
  const bool fits = !number.empty() && number.size() <= 6 && number[0] != '0' &&
                    number.find_first_not_of("0123456789") == std::string::npos;
  return fits ? "v" + number : "";
}

void Registry::add(const std::string& source_file, std::string summary,
                   std::function<std::unique_ptr<KernelPlan>()> make, bool draft) {
  const auto [language, layer, design, directory] = directory_parts(source_file);
  const std::string version = version_in(directory, design);
  if (version.empty())
    fail("kernel directory {} must be named {} or {}_v<N>, N = 1, 2, ...", directory, design, design);
  KernelEntry entry{language,           layer,           design, version, beside(source_file, ""),
                    std::move(summary), std::move(make), draft};
  entry.directory.pop_back();  // the slash
  entries_.push_back(std::move(entry));
}

std::vector<KernelEntry> Registry::all() const {
  std::vector<KernelEntry> sorted = entries_;
  std::sort(sorted.begin(), sorted.end(), [](const KernelEntry& a, const KernelEntry& b) {
    return std::tuple(a.language, a.design, version_number(a)) < std::tuple(b.language, b.design, version_number(b));
  });
  return sorted;
}

std::vector<KernelEntry> Registry::named(const std::string& kernel, const std::string& version,
                                         const std::string& language) const {
  const std::string wanted = underscored(kernel);
  std::vector<std::string> names, versions, languages;
  std::vector<KernelEntry> found;
  for (const KernelEntry& entry : all()) {
    const std::string design = entry.language + "." + entry.layer + "." + entry.design;
    names.push_back(entry.design);
    names.push_back(design);
    const bool by_name = version.empty() && (wanted == entry.name() || wanted == entry.full_name());
    const bool by_design = wanted == entry.design || wanted == design;
    if (!by_name && !by_design) continue;
    if (!language.empty() && entry.language != language) continue;
    // A full name is that of a base version; a design's name alone leaves the version open.
    if (by_name || entry.version == version || (version.empty() && wanted == entry.design)) {
      found.push_back(entry);
    } else {
      versions.push_back(entry.version);
      languages.push_back(entry.language);
    }
  }
  // Explicitly scheduled kernels come first, since they exist because they are faster.
  std::stable_partition(found.begin(), found.end(), [](const KernelEntry& entry) { return entry.language == "cute"; });
  if (!found.empty()) return found;
  if (!versions.empty()) {
    std::vector<std::string> listed = versions;  // with their language where there are several
    if (std::count(languages.begin(), languages.end(), languages.front()) != std::ptrdiff_t(languages.size()))
      for (std::size_t i = 0; i < listed.size(); ++i) listed[i] = languages[i] + " " + listed[i];
    fail("{} has no version '{}'{}; did you mean {}? There are: {}", wanted, version,
         language.empty() ? "" : " in " + language, nearest(version, versions), fmt::join(listed, ", "));
  }
  if (!language.empty())
    fail("there is no kernel '{}' in the language '{}'; `hypermla --list` shows all", kernel, language);
  fail("unknown kernel '{}'; did you mean {}? `hypermla --list` shows all", kernel, nearest(wanted, names));
}

std::vector<KernelEntry> Registry::find_all(const std::string& kernel, const std::string& version,
                                            const std::string& arch, const std::string& language) const {
  std::vector<KernelEntry> found = named(kernel, version, language);
  const KernelEntry first = found.front();
  std::erase_if(found, [&](const KernelEntry& entry) { return !entry.runs_on(arch); });
  if (std::any_of(found.begin(), found.end(), [](const KernelEntry& entry) { return !entry.draft; }))
    std::erase_if(found, [](const KernelEntry& entry) { return entry.draft; });
  if (!found.empty()) return found;
  const std::string refusal =
      fmt::format("{} is written for Hopper GPUs (sm_90) and this target is {}", first.full_name(), arch);
  // Where the kernel exists in the language that runs everywhere, in this version or at least in another.
  std::optional<KernelEntry> other;
  for (const KernelEntry& entry : all())
    if (entry.design == first.design && entry.layer == first.layer && entry.runs_on(arch) &&
        (!other || entry.version == first.version))
      other = entry;
  if (!other) fail("{}; it exists for no other target", refusal);
  if (other->version == first.version) fail("{}; take {}, which runs everywhere", refusal, other->full_name());
  fail("{}; this version exists for no other target, but {} runs everywhere", refusal, other->full_name());
}

}  // namespace hypermla
