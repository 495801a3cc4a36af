#include "hypermla/cli/options.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <set>

#include "hypermla/base/error.h"

namespace hypermla {

void add_fields(CLI::App& app, const std::vector<FieldRef>& fields, const std::string& group, Json& said) {
  for (const FieldRef& field : fields) {
    const std::string name(field.name), flag = "--" + name;
    if (app.get_option_no_throw(flag)) continue;
    const std::string help = fmt::format("{} (default {})", field.help, field.text());
    // CLI11's own conversions are not used: FieldRef::parse() says what the field accepts.
    auto set = [&said, name](const std::vector<std::string>& values) {
      said[name] = values.empty() || values.back().empty() ? "true" : values.back();
      return true;
    };
    CLI::Option* option = app.add_option(flag, CLI::callback_t(set), help)->type_name(std::string(field.type_name()));
    if (std::holds_alternative<bool*>(field.value)) option->expected(0, 1);  // --causal alone means true
    option->group(group)->take_last();
  }
}

void add_problem_fields(CLI::App& app, const std::vector<KernelEntry>& entries, Settings& said) {
  for (const KernelEntry& entry : entries) add_fields(app, entry.make()->problem_fields(), "Problem", said.problem);
}

void add_tiling_fields(CLI::App& app, KernelPlan& plan, Settings& said) {
  add_fields(app, plan.tiling_fields(), "Tiling (with --no_autotune)", said.tiling);
}

CLI::Option* add_seed(CLI::App& app, std::uint64_t& seed, const std::string& help) {
  // CLI11 itself would take -1 for 2^64 - 1.
  auto set = [&seed](const std::string& text) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
    if (error != std::errc{} || end != text.data() + text.size())
      fail("--seed={} is not supported: it must be a whole number from 0 to 18446744073709551615", text);
  };
  return app.add_option_function<std::string>("--seed", set, help)->type_name("UINT");
}

CLI::Validator within(double least, double most) {
  return CLI::Validator(
      [least, most](std::string& text) {
        double value = 0;
        if (CLI::detail::lexical_cast(text, value) && value >= least && value <= most) return std::string();
        return fmt::format("{} is no number from {} to {}", text, least, most);
      },
      "");
}

CLI::Validator whole_within(int least, int most) {
  return CLI::Validator(
      [least, most](std::string& text) {
        int value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        if (error == std::errc{} && end == text.data() + text.size() && value >= least && value <= most)
          return std::string();
        return fmt::format("{} is no whole number from {} to {}", text, least, most);
      },
      "");
}

std::filesystem::path checkout_of(const std::string& root, const std::filesystem::path& absent) {
  std::error_code unreadable;
  if (!root.empty() && !std::filesystem::is_directory(root, unreadable))
    fail("--root={} is no directory; name a checkout", root);
  return root.empty() ? absent : std::filesystem::path(root);
}

std::string flag_value(const std::vector<std::string>& arguments, const std::string& name, const std::string& absent) {
  std::string value = absent;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == name && i + 1 < arguments.size()) value = arguments[i + 1];
    if (arguments[i].rfind(name + "=", 0) == 0) value = arguments[i].substr(name.size() + 1);
  }
  return value;
}

namespace {

// A flag that takes a value and has none: `--b=`, or `--b` at the end or before the next flag.
void refuse_missing_values(const CLI::App& app, const std::vector<std::string>& arguments) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::size_t equals = arguments[i].find('=');
    const std::string flag = arguments[i].substr(0, equals);
    const CLI::Option* option = flag.rfind("--", 0) == 0 ? app.get_option_no_throw(flag) : nullptr;
    if (!option) continue;
    const bool last = i + 1 == arguments.size() || arguments[i + 1].rfind("--", 0) == 0;
    if (equals == std::string::npos ? option->get_items_expected_min() > 0 && last : equals + 1 == arguments[i].size())
      fail("{} needs a value; see {} --help", flag, app.get_name());
  }
}

// A flag of one value that is given again, where the second value does not stand for the first.
void refuse_repetitions(const CLI::App& app, const std::vector<std::string>& arguments) {
  std::set<std::string> seen;
  for (const std::string& argument : arguments) {
    const std::string flag = argument.substr(0, argument.find('='));
    const CLI::Option* option = flag.rfind("--", 0) == 0 ? app.get_option_no_throw(flag) : nullptr;
    if (!option || option->get_items_expected_max() != 1 ||
        option->get_multi_option_policy() != CLI::MultiOptionPolicy::Throw)
      continue;
    if (!seen.insert(flag).second) fail("{} is given twice; leave one out", flag);
  }
}

}  // namespace

bool parse(CLI::App& app, std::vector<std::string> arguments) {
  refuse_missing_values(app, arguments);
  refuse_repetitions(app, arguments);
  app.allow_extras();
  app.get_formatter()->column_width(36);
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
  try {
    app.parse(arguments);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return false;
  } catch (const CLI::ConversionError& error) {  // of a flag: what is a number says so itself
    const std::string said = error.what();
    fail("{} is neither true nor false; see {} --help", said.substr(std::min(said.find("--"), said.size())),
         app.get_name());
  } catch (const CLI::ParseError& error) {
    fail("{}; see {} --help", error.what(), app.get_name());
  }
  for (const std::string& extra : app.remaining()) {
    if (extra.rfind("-", 0) != 0) fail("'{}' is not expected here; see {} --help", extra, app.get_name());
    const std::string flag = extra.substr(0, extra.find('='));
    std::vector<std::string> flags;
    for (const CLI::Option* option : app.get_options())
      for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
    fail("unknown flag {}; did you mean {}? See {} --help", flag, nearest(flag, flags), app.get_name());
  }
  return true;
}

}  // namespace hypermla
