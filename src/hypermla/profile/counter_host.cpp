#include "hypermla/profile/counter_host.h"

#include "hypermla/base/error.h"

namespace hypermla {

using cupti::Library;

CounterHost::CounterHost(const Library& library, Use use, const std::string& chip, const std::uint8_t* availability)
    : library_(library) {
  HYPERMLA_CUPTI_PARAMS(HostInitialize, init, host);
  init.type = use;
  init.chip = chip.c_str();
  init.availability = availability;
  HYPERMLA_CUPTI(library_, host_initialize, &init);
  host_ = init.host;
}

CounterHost::~CounterHost() {
  HYPERMLA_CUPTI_PARAMS(HostDeinitialize, end, host);
  end.host = host_;
  library_.host_deinitialize(&end);
}

bool CounterHost::add(std::vector<const char*>& names) {
  HYPERMLA_CUPTI_PARAMS(HostAddMetrics, add, count);
  add.host = host_;
  add.names = names.data();
  add.count = names.size();
  return library_.host_add_metrics(&add) == 0;
}

std::vector<std::uint8_t> CounterHost::configuration() const {
  HYPERMLA_CUPTI_PARAMS(HostConfigSize, size, image_size);
  size.host = host_;
  HYPERMLA_CUPTI(library_, host_config_size, &size);
  std::vector<std::uint8_t> image(size.image_size);
  HYPERMLA_CUPTI_PARAMS(HostConfig, config, image);
  config.host = host_;
  config.image_size = image.size();
  config.image = image.data();
  HYPERMLA_CUPTI(library_, host_config, &config);
  return image;
}

int CounterHost::passes(std::vector<std::uint8_t>& configuration) const {
  HYPERMLA_CUPTI_PARAMS(HostPasses, passes, passes);
  passes.image_size = configuration.size();
  passes.image = configuration.data();
  HYPERMLA_CUPTI(library_, host_passes, &passes);
  return int(passes.passes);
}

std::vector<double> CounterHost::evaluate(const std::vector<std::uint8_t>& data, std::size_t range,
                                          std::vector<const char*>& names) const {
  std::vector<double> values(names.size());
  HYPERMLA_CUPTI_PARAMS(HostEvaluate, evaluate, values);
  evaluate.host = host_;
  evaluate.data = data.data();
  evaluate.data_size = data.size();
  evaluate.range = range;
  evaluate.names = names.data();
  evaluate.count = names.size();
  evaluate.values = values.data();
  HYPERMLA_CUPTI(library_, host_evaluate, &evaluate);
  return values;
}

std::unique_ptr<CounterHost> host_with(const Library& library, CounterHost::Use use, const std::string& chip,
                                       const std::uint8_t* availability, const std::vector<std::string>& metrics,
                                       std::vector<const char*>& known, std::vector<std::string>& unknown) {
  auto fresh = [&] { return std::make_unique<CounterHost>(library, use, chip, availability); };
  for (const std::string& metric : metrics) known.push_back(metric.c_str());
  if (auto host = fresh(); host->add(known)) return host;
  known.clear();
  for (const std::string& metric : metrics) {
    std::vector<const char*> one = {metric.c_str()};
    if (fresh()->add(one))
      known.push_back(metric.c_str());
    else
      unknown.push_back(metric);
  }
  auto host = fresh();
  if (known.empty() || !host->add(known)) fail("none of the {} counters exists on {}", metrics.size(), chip);
  return host;
}

std::string chip_name(const Library& library, std::size_t device) {
  HYPERMLA_CUPTI_PARAMS(ChipName, chip, name);
  chip.device = device;
  HYPERMLA_CUPTI(library, chip_name, &chip);
  return chip.name;
}

ProfilerSession::ProfilerSession(const Library& library) : library_(library) {
  HYPERMLA_CUPTI_PARAMS(Initialize, begin, reserved);
  HYPERMLA_CUPTI(library_, initialize, &begin);
}

ProfilerSession::~ProfilerSession() {
  HYPERMLA_CUPTI_PARAMS(Initialize, end, reserved);
  library_.deinitialize(&end);
}

}  // namespace hypermla
