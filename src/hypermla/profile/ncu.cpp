#include "hypermla/profile/ncu.h"

#include <algorithm>
#include <cstdlib>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/process.h"
#include "hypermla/profile/csv.h"
#include "hypermla/profile/frame.h"
#include "hypermla/profile/metrics.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::minutes kPatience{5};

// What ncu complains about, else its last line.
std::string complaint(const ProcessResult& result) {
  const std::string all = result.out + result.err;
  std::string last;
  std::size_t begin = 0;
  while (begin < all.size()) {
    const std::size_t end = std::min(all.find('\n', begin), all.size());
    const std::string line = all.substr(begin, end - begin);
    if (const std::size_t error = line.find("==ERROR== "); error != std::string::npos) return line.substr(error + 10);
    if (!line.empty()) last = line;
    begin = end + 1;
  }
  return last.empty() ? fmt::format("it ended with status {}", result.status) : last;
}

std::string without_thousands(std::string text) {
  text.erase(std::remove(text.begin(), text.end(), ','), text.end());
  return text;
}

}  // namespace

std::string ncu_version(const std::string& program) {
  if (program.empty()) fail("Nsight Compute (ncu) was not found; install it, or put it on PATH");
  const ProcessResult result = run_process({program, "--version"});
  const std::size_t at = result.out.find("Version ");
  if (result.status != 0 || at == std::string::npos) fail("{} does not tell its version", program);
  return "ncu " + result.out.substr(at + 8, result.out.find_first_of(" \n", at + 8) - at - 8);
}

std::vector<std::map<std::string, double>> parse_ncu_raw(const std::string& csv,
                                                         const std::vector<std::string>& kernels) {
  const auto rows = parse_csv(csv);
  std::size_t header = 0;
  while (header < rows.size() && (rows[header].empty() || rows[header][0] != "ID")) ++header;
  if (header + 2 >= rows.size()) fail("ncu's raw page holds no launch; was the kernel run?");
  const auto& names = rows[header];
  const auto kernel_column = std::find(names.begin(), names.end(), "Kernel Name") - names.begin();
  if (std::size_t(kernel_column) == names.size())
    fail("ncu's raw page has no column 'Kernel Name'; this version of ncu is not known here");
  std::vector<std::map<std::string, double>> result;
  for (std::size_t i = header + 2; i < rows.size() && result.size() < kernels.size(); ++i) {
    const auto& row = rows[i];
    if (row.size() != names.size() || row[std::size_t(kernel_column)].find(kernels[result.size()]) == std::string::npos)
      continue;
    std::map<std::string, double> values;
    for (std::size_t column = 0; column < row.size(); ++column) {
      const std::string text = without_thousands(row[column]);
      char* end = nullptr;
      const double value = std::strtod(text.c_str(), &end);
      if (!text.empty() && *end == '\0') values[names[column]] = value;
    }
    result.push_back(values);
  }
  if (result.size() != kernels.size())
    fail("ncu saw {} of the {} kernels; run the profile again", result.size(), kernels.size());
  return result;
}

namespace {

std::string first_sentence(const std::string& text) {
  const std::size_t end = text.find(". ");
  return end == std::string::npos ? text : text.substr(0, end + 1);
}

}  // namespace

std::vector<NcuAdvice> parse_ncu_advice(const std::string& csv) {
  std::map<std::string, std::size_t> columns;
  std::vector<NcuAdvice> advice;
  for (const auto& row : parse_csv(csv)) {
    if (!row.empty() && row[0] == "ID") {
      for (std::size_t i = 0; i < row.size(); ++i) columns[row[i]] = i;
      continue;
    }
    auto text = [&](const char* name) {
      const auto column = columns.find(name);
      return column != columns.end() && column->second < row.size() ? row[column->second] : std::string();
    };
    if (text("Rule Name").empty()) continue;
    NcuAdvice one{text("Rule Name"), text("Rule Type"), text("Rule Description"), {}};
    if (const std::string speedup = text("Estimated Speedup"); !speedup.empty())
      one.gain_percent = std::strtod(speedup.c_str(), nullptr);
    advice.push_back(one);
  }
  std::stable_sort(advice.begin(), advice.end(), [](const NcuAdvice& a, const NcuAdvice& b) {
    return a.gain_percent.value_or(-1) > b.gain_percent.value_or(-1);
  });
  return advice;
}

std::vector<SourceSamples> parse_ncu_source(const std::string& csv) {
  std::vector<SourceSamples> files;
  std::vector<std::string> names;
  for (const auto& row : parse_csv(csv)) {
    if (row.size() >= 2 && row[0] == "File Path") {
      files.push_back({row[1], {}});
    } else if (!row.empty() && row[0] == "Line No") {
      names = row;
    } else if (!files.empty() && !row.empty() && row.size() == names.size() &&
               row[0].find_first_not_of("0123456789") == std::string::npos && !row[0].empty()) {
      SourceSamples::Line line;
      line.number = std::atoi(row[0].c_str());
      double most = 0;
      for (std::size_t i = 1; i < row.size(); ++i) {
        const double value = std::strtod(without_thousands(row[i]).c_str(), nullptr);
        if (names[i] == "# Samples") line.samples = value;
        if (names[i] == "Instructions Executed") line.instructions = value;
        if (names[i].rfind("stall_", 0) == 0 && names[i].find(' ') == std::string::npos && value > most) {
          most = value;
          line.stall = names[i].substr(6);
        }
      }
      files.back().lines.push_back(line);
    }
  }
  return files;
}

namespace {

const std::map<std::string, const char*>& stall_words() {
  static const std::map<std::string, const char*> words = {{"barrier", "waits at a barrier"},
                                                           {"branch_resolving", "waits for a branch"},
                                                           {"dispatch", "dispatch is busy"},
                                                           {"drain", "waits for stores to leave"},
                                                           {"imc", "waits for a constant"},
                                                           {"lg", "load queue full"},
                                                           {"long_sb", "waits for global memory"},
                                                           {"math", "math pipe busy"},
                                                           {"membar", "waits at a fence"},
                                                           {"mio", "MIO queue full"},
                                                           {"no_inst", "waits for instructions"},
                                                           {"not_selected", "ready, another issued"},
                                                           {"selected", "issues"},
                                                           {"short_sb", "waits for shared memory or exp2"},
                                                           {"sleep", "sleeps"},
                                                           {"tex", "texture queue full"},
                                                           {"wait", "fixed latency"},
                                                           {"gmma", "waits for wgmma"}};
  return words;
}

std::string stall_text(const std::string& stall) {
  const auto found = stall_words().find(stall);
  return found == stall_words().end() ? stall : found->second;
}

}  // namespace

double total_samples(const std::vector<SourceSamples>& files) {
  double total = 0;
  for (const SourceSamples& file : files)
    for (const auto& line : file.lines) total += line.samples;
  return total;
}

std::string annotate_source(const std::string& source, const SourceSamples& samples, const std::string& kernel,
                            double total) {
  std::map<int, SourceSamples::Line> lines;
  for (const auto& line : samples.lines) {
    auto& sum = lines[line.number];
    if (line.samples > sum.samples) sum.stall = line.stall;  // a line may be in several functions
    sum.samples += line.samples;
    sum.instructions += line.instructions;
  }
  std::string text = fmt::format(
      "// {}: {:.0f} samples of its warps, {:.0f} of them here. Columns: share of all, what they mostly wait for.\n",
      kernel, total, total_samples({samples}));
  int number = 0;
  for (std::size_t begin = 0; begin < source.size();) {
    const std::size_t end = std::min(source.find('\n', begin), source.size());
    const auto found = lines.find(++number);
    const double share = found == lines.end() || total == 0 ? 0 : 100 * found->second.samples / total;
    if (share > 0)
      text += fmt::format("{} {:5.1f} % {:<31} | ", share >= 5 ? ">>" : "  ", share, stall_text(found->second.stall));
    else
      text += fmt::format("{:42} | ", "");
    text += source.substr(begin, end - begin) + "\n";
    begin = end + 1;
  }
  return text;
}

namespace {

// Runs ncu with `what` over a second run of this program.
void collect(const ProfileRequest& request, const std::vector<std::string>& what, const fs::path& report) {
  std::vector<std::string> command = {
      request.tools.ncu, "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "all"};
  command.insert(command.end(), what.begin(), what.end());
  command.insert(command.end(), {"-f", "-o", report.string(), "--"});
  const std::vector<std::string> again = relaunch_command(request);
  command.insert(command.end(), again.begin(), again.end());
  const ProcessResult result = run_process(command, {.timeout = kPatience});
  if (result.timed_out) fail("ncu did not end within {} minutes; choose a smaller problem", kPatience.count());
  if (result.status != 0 || !fs::exists(report.string() + ".ncu-rep")) fail("{}", complaint(result));
}

std::string page(const ProfileTools& tools, const fs::path& report, const std::vector<std::string>& words) {
  std::vector<std::string> command = {tools.ncu, "--import", report.string() + ".ncu-rep", "--page"};
  command.insert(command.end(), words.begin(), words.end());
  const ProcessResult result = run_process(command, {.timeout = kPatience});
  if (result.status != 0) fail("{}", complaint(result));
  return result.out;
}

std::vector<std::string> kernel_names(const ProfileRequest& request) {
  std::vector<std::string> names;
  for (TiledKernel* kernel : launched_kernels(request.executable)) names.push_back(kernel->name());
  return names;
}

std::vector<std::map<std::string, double>> raw_metrics(const ProfileRequest& request, const fs::path& report) {
  auto all = parse_ncu_raw(
      page(request.tools, report, {"raw", "--csv", "--print-units", "base", "--print-metric-instances", "none"}),
      kernel_names(request));
  for (auto& values : all)  // ncu has thousands of its own
    std::erase_if(values, [](const auto& value) { return !find_counter(value.first); });
  return all;
}

std::string all_metrics() { return fmt::format("{}", fmt::join(metric_names(), ",")); }

// The file below our kernels that a compiler, maybe on another machine, recorded as `path`.
fs::path own_source(const std::vector<fs::path>& kernel_roots, const std::string& path) {
  const std::size_t at = path.rfind("/kernels/");
  if (at == std::string::npos) return {};
  std::error_code unreadable;
  for (const fs::path& root : kernel_roots)
    if (const fs::path file = root / path.substr(at + 9); fs::is_regular_file(file, unreadable)) return file;
  return {};
}

// The artifacts of one kernel; returns its part of the report.
std::string kernel_artifacts(const Frame& frame, const fs::path& report, const std::string& kernel) {
  const ProfileTools& tools = frame.request.tools;
  auto export_page = [&](std::vector<std::string> words) {
    words.insert(words.end(), {"--kernel-name", kernel});
    return page(tools, report, words);
  };
  const std::string details = export_page({"details", "--csv", "--print-units", "base"});
  frame.write(kernel + "/ncu-details.csv", details);
  frame.write(kernel + "/sass-metrics.csv", export_page({"source", "--csv", "--print-source", "sass"}));

  std::string text = fmt::format("### {}\n\n", kernel);
  int shown = 0;
  for (const NcuAdvice& advice : parse_ncu_advice(details)) {
    // Its estimate assumes memory that was allocated compressible, which tensors here never are.
    if (advice.rule == "MemoryL2Compression") continue;
    if (advice.kind != "OPT" || shown == 5) continue;
    ++shown;
    text += fmt::format("{}. {} ({}{})\n", shown, first_sentence(advice.text), advice.rule,
                        advice.gain_percent ? fmt::format(", est. {:.0f} %", *advice.gain_percent) : "");
  }
  if (shown == 0) text += "NVIDIA's rules have no advice.\n";
  const std::vector<SourceSamples> files =
      parse_ncu_source(export_page({"source", "--csv", "--print-source", "cuda,sass"}));
  const double total = total_samples(files);
  for (const SourceSamples& samples : files) {
    const fs::path file = own_source(tools.kernel_roots, samples.path);
    if (file.empty() || total_samples({samples}) == 0) continue;
    const std::string source = read_file(file);
    frame.write("annotated-src/" + kernel + "/" + file.filename().string(),
                annotate_source(source, samples, kernel, total));
    auto lines = samples.lines;
    std::stable_sort(lines.begin(), lines.end(), [](const auto& a, const auto& b) { return a.samples > b.samples; });
    text += fmt::format("\n| line of {} | of all samples | mostly |\n|---|---|---|\n", file.filename().string());
    for (std::size_t i = 0; i < std::min<std::size_t>(lines.size(), 5); ++i)
      if (lines[i].samples > 0)
        text += fmt::format("| {} | {:.0f} % | {} |\n", lines[i].number, 100 * lines[i].samples / total,
                            stall_text(lines[i].stall));
  }
  return text + "\n";
}

}  // namespace

std::vector<std::map<std::string, double>> ncu_counters(const ProfileRequest& request) {
  const Scratch scratch(fs::temp_directory_path() / "hypermla-ncu", Scratch::Kind::directory);
  const fs::path report = scratch.path() / "report";
  collect(request, {"--metrics", all_metrics()}, report);
  return raw_metrics(request, report);
}

ProfileResult ncu_profile(const ProfileRequest& request) {
  if (!request.device.is_gpu()) fail("the mode ncu looks into a GPU; on a CPU use annotation or event");
  Frame frame(request, ProfileMode::ncu);
  frame.time(0);
  const ProfileTools& tools = request.tools;
  Profile::Counters& counters = frame.profile.counters.emplace();
  try {
    const std::string version = ncu_version(tools.ncu);
    const fs::path report = frame.directory / "report";
    std::vector<std::string> what = {"--set", "full", "--metrics", all_metrics(), "--import-source", "yes"};
    std::vector<std::string> folders;
    for (const fs::path& root : tools.kernel_roots) folders.push_back(root.string());
    if (!folders.empty()) what.insert(what.end(), {"--source-folders", fmt::format("{}", fmt::join(folders, ","))});
    collect(request, what, report);
    const auto metrics = raw_metrics(request, report);
    std::string text = "## Nsight Compute\n\n";
    for (std::size_t i = 0; i < metrics.size(); ++i) {
      frame.set_metrics(i, metrics[i], version);
      text += kernel_artifacts(frame, report, frame.profile.stages[i].name);
    }
    frame.write("report-verbose.md",
                "# Nsight Compute, every section and rule\n\n```\n" +
                    page(tools, report, {"details", "--print-details", "all", "--print-rule-details"}) + "```\n");
    frame.profile.ncu_report = text;
    counters.source = version;
  } catch (const Error& error) {
    counters.attempts.push_back(fmt::format("ncu: {}", error.what()));
    frame.profile.missing = "no report of Nsight Compute, only times";
  }
  frame.judge();
  return frame.publish();
}

}  // namespace hypermla
