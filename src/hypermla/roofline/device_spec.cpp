#include "hypermla/roofline/device_spec.h"

#include <algorithm>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/json_file.h"

namespace hypermla {
namespace {

// Of a damaged file a key may be all of its megabytes.
std::string shortened(std::string key) {
  constexpr std::size_t kMost = 80;
  if (key.size() > kMost) key.replace(kMost, std::string::npos, "..");
  return key;
}

double number_of(std::string_view device, std::string_view key, const Json& value) {
  if (!value.is_number() || !(value.get<double>() > 0))
    fail("device '{}': {} is {}, but must be a positive number", device, key, value.dump());
  return value.get<double>();
}

std::string text_of(std::string_view device, std::string_view key, const Json& value) {
  if (!value.is_string()) fail("device '{}': {} is {}, but must be a string", device, key, value.dump());
  return value.get<std::string>();
}

void check_reach(std::string_view device, const Json& reach) {
  const std::vector<std::string> paths = {"latent", "decompressed", "hybrid"}, terms = {"tensor", "memory", "overlap"};
  const auto check = [&](const std::string& key, const std::vector<std::string>& known) {
    if (std::find(known.begin(), known.end(), key) == known.end())
      fail("device '{}': reach has no key '{}'; did you mean '{}'?", device, shortened(key),
           nearest(shortened(key), known));
  };
  if (!reach.is_object()) fail("device '{}': reach is {}, but must be an object", device, reach.dump());
  for (const auto& [path, of] : reach.items()) {
    check(path, paths);
    if (!of.is_object()) fail("device '{}': reach of {} is {}, but must be an object", device, path, of.dump());
    for (const auto& [term, value] : of.items()) {
      check(term, terms);
      number_of(device, term, value);
    }
  }
}

void check_measured(std::string_view device, const Json& measured) {
  if (!measured.is_object()) fail("device '{}': measured is {}, but must be an object", device, measured.dump());
  for (const auto& [key, value] : measured.items()) {
    if (std::find(kMeasuredKeys.begin(), kMeasuredKeys.end(), key) == kMeasuredKeys.end()) {
      fail("device '{}': measured has no key '{}'; did you mean '{}'?", device, shortened(key),
           nearest(shortened(key), {kMeasuredKeys.begin(), kMeasuredKeys.end()}));
    }
    if (key == "date" || key == "note") {
      text_of(device, key, value);
    } else if (key == "reach") {
      check_reach(device, value);
    } else {
      number_of(device, key, value);
    }
  }
}

Json parse_devices(const std::filesystem::path& path) {
  const Json devices = read_json(path);
  if (devices.is_discarded()) fail("{} is not valid JSON: mend or remove it", path.string());
  if (!devices.is_object()) fail("{} must be a JSON object of device name -> entry", path.string());
  for (const auto& [name, entry] : devices.items()) {
    if (!entry.is_object()) fail("{}: the entry of '{}' must be an object", path.string(), name);
  }
  return devices;
}

Json parse_overlay(const std::filesystem::path& path) {
  std::error_code unreadable;  // parse_devices() says why
  if (path.empty() || std::filesystem::status(path, unreadable).type() == std::filesystem::file_type::not_found)
    return Json::object();
  return parse_devices(path);
}

std::map<std::string, DeviceSpec> specs_of(const Json& entries, const std::filesystem::path& path) {
  std::map<std::string, DeviceSpec> specs;
  try {
    for (const auto& [name, entry] : entries.items()) specs.emplace(name, device_spec_from_json(name, entry));
  } catch (const Error& error) {
    fail("{}: {}", path.string(), error.what());
  }
  return specs;
}

}  // namespace

double DeviceSpec::peak_tflops(DType dtype) const {
  const double tflops = dtype == DType::bfloat16  ? bfloat16_tflops
                        : dtype == DType::float16 ? float16_tflops
                                                  : float32_tflops;
  if (!(tflops > 0)) {
    fail(
        "the {} rate of device '{}' is not known: run `hypermla device --measure`, or add "
        "peak_{}_float32_tflops to its entry in devices.json",
        dtype_name(dtype), name, dtype_name(dtype));
  }
  return tflops;
}

DeviceSpec device_spec_from_json(std::string_view name, const Json& entry) {
  DeviceSpec spec;
  spec.name = name;
  std::vector<std::string> known;
  const auto read = [&](std::string_view key, auto&& use) {
    known.emplace_back(key);
    if (const auto found = entry.find(key); found != entry.end()) use(key, *found);
  };
  const auto number = [&](double& to) {
    return [&to, name](std::string_view key, const Json& value) { to = number_of(name, key, value); };
  };
  read("peak_bfloat16_float32_tflops", number(spec.bfloat16_tflops));
  read("peak_float16_float32_tflops", number(spec.float16_tflops));
  read("peak_float32_float32_tflops", number(spec.float32_tflops));
  read("peak_dram_bw_GBps", number(spec.peak_gbps));
  read("sm_count", [&](std::string_view key, const Json& value) {
    if (!(number_of(name, key, value) < 1e6))
      fail("device '{}': {} is {}, but no device has so many", name, key, value.dump());
    spec.sm_count = value.get<int>();
  });
  read("arch", [&](std::string_view key, const Json& value) { spec.arch = text_of(name, key, value); });
  read("note", [&](std::string_view key, const Json& value) { spec.note = text_of(name, key, value); });
  read("measured", [&](std::string_view, const Json& value) {
    check_measured(name, value);
    spec.measured = value;
  });
  for (const auto& [key, value] : entry.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end())
      fail("device '{}' has no key '{}'; did you mean '{}'?", name, shortened(key), nearest(shortened(key), known));
  }

  const double vector_tflops = spec.measured_or("fma_gflops", 0) / 1e3;
  const double matmul_tflops = spec.measured_or("matmul_burst_tflops", 0);
  const double tensor_tflops = matmul_tflops > 0 ? matmul_tflops : vector_tflops;
  if (spec.bfloat16_tflops == 0) spec.bfloat16_tflops = tensor_tflops;
  if (spec.float16_tflops == 0) spec.float16_tflops = tensor_tflops;
  if (spec.float32_tflops == 0) spec.float32_tflops = vector_tflops;
  if (spec.peak_gbps == 0) spec.peak_gbps = spec.measured_or("read_GBps", 0);
  return spec;
}

DeviceTable DeviceTable::load(const std::filesystem::path& devices, const std::filesystem::path& overlay) {
  Json entries = parse_devices(devices);
  DeviceTable table;
  table.specs_ = specs_of(entries, devices);
  std::error_code error;
  if (!std::filesystem::exists(overlay, error) && error == std::errc::permission_denied) {
    table.ignored_ = fmt::format("'{}' cannot be looked into; set HYPERMLA_CACHE_DIR to a directory of your own",
                                 overlay.parent_path().string());
    return table;
  }
  try {
    const Json changes = parse_overlay(overlay);
    for (const auto& [name, entry] : changes.items())
      for (const auto& [key, value] : entry.items()) entries[name][key] = value;
    table.specs_ = specs_of(entries, overlay);
  } catch (const Error& error) {
    table.ignored_ = fmt::format("{}; `hypermla device --measure` writes that file anew", error.what());
  }
  return table;
}

std::vector<std::string> DeviceTable::names() const {
  std::vector<std::string> names;
  for (const auto& [name, spec] : specs_) names.push_back(name);
  return names;
}

const DeviceSpec& DeviceTable::find(const std::string& name) const {
  const auto found = specs_.find(name);
  if (found == specs_.end()) {
    fail(
        "device '{}' has no entry in devices.json; did you mean '{}'? `hypermla device --measure` adds the present "
        "device",
        name, nearest(name, names()));
  }
  return found->second;
}

const DeviceSpec& DeviceTable::of_arch(const std::string& arch) const {
  const DeviceSpec* found = nullptr;
  for (const auto& [name, spec] : specs_)
    if (spec.arch == arch && (!found || spec.peak_gbps > found->peak_gbps)) found = &spec;
  return found ? *found : find("CPU");
}

void save_measured(const std::filesystem::path& overlay, const std::string& name, const Json& measured) {
  check_measured(name, measured);
  const std::filesystem::path directory = std::filesystem::absolute(overlay).parent_path();
  make_directories(directory, Access::owner);
  const FileDescriptor lock = lock_directory(directory);  // what another process measures meanwhile is not lost
  Json devices = Json::object();
  try {
    devices = parse_overlay(overlay);
  } catch (const Error&) {  // it was not used either, but its owner may want to mend it
    std::error_code failed;
    std::filesystem::rename(overlay, overlay.string() + ".unusable", failed);
  }
  devices[name]["measured"] = measured;
  write_file_atomic(overlay, devices.dump(2) + "\n", Access::owner);
}

}  // namespace hypermla
