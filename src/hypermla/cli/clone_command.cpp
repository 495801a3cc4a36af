#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "hypermla/api/environment.h"
#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/pattern.h"
#include "hypermla/base/process.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/options.h"
#include "hypermla/compile/source_text.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

// flash_attention_v2 -> FlashAttentionV2
std::string in_pascal_case(const std::string& name) {
  std::string pascal;
  bool begins = true;
  for (const char c : name) {
    if (c != '_') pascal += begins ? char(std::toupper(static_cast<unsigned char>(c))) : c;
    begins = c == '_';
  }
  return pascal;
}

// What stands in `word` behind `name`, in either spelling, with a k before it or not: flash_attention_reduce and
// kFlashAttentionRows, but not flash_attentions. Empty optional: `word` is another name.
std::optional<std::string> behind(const std::string& word, const std::string& name) {
  const auto rest = [&](const std::string& begin, auto&& may_follow) -> std::optional<std::string> {
    if (word.rfind(begin, 0) != 0) return std::nullopt;
    if (word.size() > begin.size() && !may_follow(word[begin.size()])) return std::nullopt;
    return word.substr(begin.size());
  };
  const auto new_word = [](unsigned char c) { return std::isupper(c) != 0; };
  if (auto found = rest(name, [](char c) { return c == '_'; })) return found;
  if (auto found = rest(in_pascal_case(name), new_word)) return found;
  return rest("k" + in_pascal_case(name), new_word);
}

// Every comment, literal and identifier of C++ source, with what it becomes; the text between them stays.
template <class Comment, class Literal, class Identifier>
std::string rewritten(const std::string& text, Comment&& comment, Literal&& literal, Identifier&& identifier) {
  static const Pattern token(R"(//[^\n]*|/\*[^]*?\*/|"(?:\\.|[^"\\\n])*"|[A-Za-z_]\w*)");
  std::string all;
  std::size_t last = 0;
  for (const Pattern::Found& at : token.search_all(text)) {
    const std::string& found = at.groups[0];
    all.append(text, last, at.begin - last);
    all += found[0] == '/' ? comment(found) : found[0] == '"' ? literal(found) : identifier(found);
    last = at.end();
  }
  return all.append(text, last);
}

// A line that longer names made too long for the project, broken at blanks that may be a new line in C++, too.
// clang-format, which need not be here, does it better.
std::string folded_line(const std::string& line) {
  constexpr std::size_t kColumns = 120;
  const std::size_t indent = line.find_first_not_of(' ');
  if (line.size() <= kColumns || line[indent] == '#' || line.back() == '\\') return line;
  std::size_t at = std::string::npos, comment = std::string::npos;
  bool quoted = false;
  for (std::size_t i = indent; i <= kColumns; ++i) {
    const char before = i == 0 ? ' ' : line[i - 1];
    if (line[i] == ' ' && !quoted && before != '/') at = i;
    if (comment != std::string::npos) continue;
    if (line.compare(i, 1, "\"") == 0 && before != '\\') quoted = !quoted;
    if (!quoted && line.compare(i, 2, "//") == 0) comment = i;
  }
  if (at == std::string::npos) return line;
  const std::string begin = std::string(indent, ' ') + (comment < at ? "// " : "    ");
  return line.substr(0, line.find_last_not_of(' ', at) + 1) + "\n" + folded_line(begin + line.substr(at + 1));
}

std::string folded(const std::string& text) {
  std::string all;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    all += folded_line(text.substr(begin, end - begin)) + (end < text.size() ? "\n" : "");
    begin = end + 1;
  }
  return all;
}

const auto kKeep = [](const std::string& text) { return text; };

std::set<std::string> identifiers(const std::string& text) {
  std::set<std::string> all;
  rewritten(text, kKeep, kKeep, [&](const std::string& word) { return all.insert(word), word; });
  return all;
}

// The names at namespace scope of a header: host code of two versions that gave one name to two things would be linked
// to one of them.
std::set<std::string> declared(const std::string& header) {
  static const Pattern type(R"((?:^|\n)(?:struct|class|enum class|using) +(?:alignas\(\w+\) +)?(\w+))");
  static const Pattern value(R"((?:^|\n)(?:inline |constexpr |static |const )+[\w:<>&*\s]*?\b(\w+) ?[({=])");
  static const Pattern line(R"((?:^|\n)(?:inline |constexpr )+[^\n(]*;)"), further(R"(, (\w+) =)");
  std::set<std::string> names;
  const auto add = [&names](const std::string& text, const Pattern& pattern) {
    for (const Pattern::Found& at : pattern.search_all(text)) names.insert(at.groups[1]);
  };
  add(header, type);
  add(header, value);
  for (const Pattern::Found& at : line.search_all(header)) add(at.groups[0], further);
  return names;
}

// What the files and the names of a version become in its copy. A name is the version's own if it is made from the name
// of the version, or if a header of the version declares it. A name that an included file of others has, too, is
// theirs: the form's OutputDecompressionProblem beside the version's OutputDecompressionTiling.
class Renaming {
 public:
  Renaming(const KernelEntry& from, std::string to, const std::map<std::string, std::string>& files,
           const std::vector<fs::path>& include_paths)
      : from_(from.name()), from_version_(from.version), published_(in_pascal_case(from.design)), to_(std::move(to)) {
    for (const KernelEntry& other : Registry::instance().all())
      if (other.name() != from_ && behind(other.name(), from_)) longer_.insert(other.name());
    for (const auto& [path, text] : files) {
      files_.insert(fs::path(path).filename().string());
      if (path.ends_with(".h")) declared_.merge(declared(text));
      for (const SourceFile& included : source_closure(path, include_paths)) {
        const fs::path directory = fs::path(included.name).parent_path();
        if (directory.filename() != from_ || directory.parent_path().filename() != from.design)
          theirs_.merge(identifiers(included.text));
      }
    }
  }

  std::string file(const std::string& name) const {
    return name.rfind(from_, 0) == 0 ? to_ + name.substr(from_.size()) : name;
  }

  std::string identifier(const std::string& word) const {
    if (word == "HYPERMLA_REGISTER") return "HYPERMLA_REGISTER_DRAFT";  // no GPU has verified the copy
    if (theirs_.count(word)) return word;
    if (is_own(word)) {
      const std::size_t size = word.size() - behind(word, from_)->size();
      const bool snake = word.rfind(from_, 0) == 0;
      const std::string k = !snake && word[0] == 'k' ? "k" : "";
      return k + (snake ? to_ : in_pascal_case(to_)) + word.substr(size);
    }
    return declared_.count(word) ? versioned(word) : word;
  }

  std::string source(const std::string& text) const {
    const auto literal = [this](const std::string& quoted) {
      const std::string inside = quoted.substr(1, quoted.size() - 2);
      if (files_.count(inside)) return '"' + file(inside) + '"';  // #include, and beside()
      return is_own(inside) ? '"' + identifier(inside) + '"' : quoted;
    };
    // Records, logs and pages that a comment names stay those of the original, and so does the published algorithm.
    const auto comment = [this](const std::string& said) {
      static const Pattern name(R"([\w./*-]+)");
      std::string all;
      std::size_t last = 0;
      for (const Pattern::Found& at : name.search_all(said)) {
        const std::string& word = at.groups[0];
        all.append(said, last, at.begin - last);
        all += word == published_ ? word : files_.count(word) ? file(word) : identifier(word);
        last = at.end();
      }
      return all.append(said, last);
    };
    return folded(rewritten(text, comment, literal, [this](const std::string& word) { return identifier(word); }));
  }

 private:
  bool is_own(const std::string& word) const {
    if (!behind(word, from_)) return false;
    return std::none_of(longer_.begin(), longer_.end(),
                        [&](const std::string& other) { return behind(word, other).has_value(); });
  }

  // Chunk -> ChunkV7, chunk_at -> chunk_at_v7; of a copy of a copy the suffix is replaced.
  std::string versioned(std::string name) const {
    const bool snake = std::none_of(name.begin(), name.end(), [](unsigned char c) { return std::isupper(c); });
    const auto suffix = [&](const std::string& version) { return snake ? "_" + version : in_pascal_case(version); };
    if (name.ends_with(suffix(from_version_))) name.erase(name.size() - suffix(from_version_).size());
    return name + suffix(to_.substr(to_.rfind("_v") + 1));
  }

  std::string from_, from_version_, published_, to_;
  std::set<std::string> longer_;    // names of other versions and kernels that begin as `from_` does
  std::set<std::string> files_;     // of the version
  std::set<std::string> declared_;  // by its headers
  std::set<std::string> theirs_;
};

// Where the name leaves them open: the base version, and the language that runs everywhere.
KernelEntry find_original(const std::string& kernel, const std::string& version, const std::string& language) {
  std::vector<KernelEntry> found = Registry::instance().find_all(kernel, version, "sm_90", language);
  const auto prefer = [&](auto&& preferred) { std::stable_partition(found.begin(), found.end(), preferred); };
  prefer([](const KernelEntry& entry) { return entry.language == "cutile"; });
  prefer([](const KernelEntry& entry) { return entry.version == "v0"; });
  return found.front();
}

// The sources of a version by their paths. A build takes the version's name from the directory, so one that was renamed
// is found under the new name, with files of the old one.
std::map<std::string, std::string> read_version(const KernelEntry& entry, const std::vector<fs::path>& roots) {
  for (const fs::path& root : roots) {
    const fs::path directory = root / entry.directory;
    if (!fs::exists(directory / (entry.name() + ".cpp"))) {
      std::error_code absent;
      for (const auto& one : fs::directory_iterator(directory, absent))
        if (one.path().extension() == ".cpp")
          fail(
              "{} holds {} and no {}.cpp: was the directory renamed? Give it the name of its files again, and make the "
              "new version by `hypermla clone`",
              directory.string(), one.path().filename().string(), entry.name());
      continue;
    }
    std::map<std::string, std::string> files;
    for (const auto& one : fs::directory_iterator(directory)) files[one.path().string()] = read_file(one.path());
    return files;
  }
  std::vector<std::string> places;
  for (const fs::path& root : roots) places.push_back((root / entry.directory).string());
  const std::string missing = fmt::format("the plan of {} is not in {}", entry.full_name(), fmt::join(places, " or "));
  if (fs::exists(roots.front().parent_path() / "CMakeLists.txt"))
    fail("{}: it was moved or removed after the build; put it back, or run ./hypermla, which builds again", missing);
  fail("{}: an installation holds no plans; call this in a checkout, or point HYPERMLA_ROOT at one", missing);
}

void require_version(const std::string& suffix, const KernelEntry& original) {
  static const Pattern pattern("v[1-9][0-9]{0,5}");
  if (pattern.match(suffix)) return;
  fail("'{}' names no version: take v1, v2, ..., as in `hypermla clone {} v7`", suffix, original.full_name());
}

// Complete or not at all: written aside, outside of what a build looks through, and renamed.
void publish(const fs::path& directory, const fs::path& kernels, const std::map<std::string, std::string>& files) {
  sweep_scratch(kernels.parent_path());
  const Scratch scratch(kernels.parent_path() / "clone", Scratch::Kind::directory);
  // Users that may read the kernels may read the copy, and this user alone may write it.
  using enum fs::perms;
  const fs::perms allowed = fs::status(kernels).permissions() & ~(group_write | others_write);
  for (const auto& [name, text] : files) {
    write_new_file(scratch.path() / name, text);
    fs::permissions(scratch.path() / name, allowed & ~(owner_exec | group_exec | others_exec));
  }
  fs::permissions(scratch.path(), allowed);
  std::vector<fs::path> made;  // of a directory of one's own the layers above may be missing
  std::error_code failed, ignored;
  for (fs::path above = directory.parent_path(); !fs::exists(above); above = above.parent_path()) made.push_back(above);
  fs::create_directories(directory.parent_path(), failed);
  for (const fs::path& above : made) fs::permissions(above, allowed, ignored);
  if (!failed) fs::rename(scratch.path(), directory, failed);
  if (failed) {
    for (const fs::path& above : made) fs::remove(above, ignored);                     // if it is empty
    if (failed == std::errc::directory_not_empty || failed == std::errc::file_exists)  // another one was faster
      fail("{} exists already; choose another version, or edit that one", directory.string());
    fail_file("write", directory, failed.value());
  }
  sync_directory(directory.parent_path());
}

}  // namespace

int clone_command(const Words& words) {
  std::string kernel, language;
  std::vector<std::string> versions;
  CLI::App app(
      "Begin a new version of a kernel as a copy of another: its directory with files, kernel, plan, structs and\n"
      "registration renamed. The copy is a draft, and is built like every other version. With HYPERMLA_KERNELS it is\n"
      "made in that directory (docs/own-kernels.md).\n",
      "hypermla clone");
  app.add_option("kernel", kernel, "the version to copy: mla_var6_plus_v2, cute.mla.flash_mla, or a design")
      ->required();
  app.add_option("version", versions, "[its version] <name of the new one>: v7, or v1 v7")->required()->expected(1, 2);
  app.add_option("--language", language, "cute or cutile (default: cutile, where the kernel exists in it)");
  if (!parse(app, words)) return 0;

  const KernelEntry original = find_original(kernel, versions.size() == 2 ? versions.front() : "", language);
  const std::string suffix = versions.back(), name = original.design + "_" + suffix;
  require_version(suffix, original);
  const Environment environment = Environment::detect();
  std::vector<fs::path> roots = {environment.kernel_root()};
  if (!environment.own_kernels.empty()) roots.push_back(environment.own_kernels);
  const fs::path design = fs::path(original.directory).parent_path();
  const auto refuse = [&](const std::string& where) {
    fail("{} {} exists already, {}; choose another version, or edit that one", original.design, suffix, where);
  };
  for (const fs::path& root : roots)
    if (fs::exists(root / design / name)) refuse("in " + (root / design / name).string());
  for (const KernelEntry& other : Registry::instance().all())
    if (other.language == original.language && other.name() == name) refuse("in this program");

  const std::map<std::string, std::string> sources = read_version(original, roots);
  std::vector<fs::path> include_paths = {environment.root / "include", environment.root / "src"};
  for (const fs::path& root : roots) include_paths.insert(include_paths.end(), {root, root / "cutile", root / "cute"});
  const Renaming renaming(original, name, sources, include_paths);
  std::map<std::string, std::string> files;
  for (const auto& [path, text] : sources) files[renaming.file(fs::path(path).filename())] = renaming.source(text);
  const fs::path directory = roots.back() / design / name;
  publish(directory, roots.back(), files);

  const std::string made = original.language + "." + original.layer + "." + original.design + " " + suffix;
  fmt::print("cloned    {} as {}, a draft\n", original.full_name(), made);
  for (const auto& [file, text] : files) fmt::print("          {}\n", (directory / file).string());
  fmt::print("edit      one idea, and say what you expect of it before you measure; clang-format -i {}/*\n",
             shell_word(directory.string()));
  fmt::print("check     ./hypermla kernel {} --check --prof_type=disabled\n", made);
  fmt::print("measure   ./hypermla kernel {} --prof_type=event, and {} the same\n", made, original.full_name());
  fmt::print("compare   ./hypermla compare <run of the original> <run of the copy>\n");
  fmt::print("log       prediction and outcome, refuted ideas too: ./hypermla devlog add {} \\\n", made);
  fmt::print(
      "            --profile=<run of the copy> --baseline=<run of the original> --changed=.. --why=.. --insight=..\n");
  return 0;
}

}  // namespace hypermla
