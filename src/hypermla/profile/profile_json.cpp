// profile.json: every key of it, once. `fields` of a struct serves both directions:
//
//   field("median_us", x.median_us)              always written, and must be there
//   field("watts", x.watts)                      std::optional: written where it has a value
//   field("label", x.label, !x.label.empty())    written where the condition holds, and may be absent
#include "hypermla/base/error.h"
#include "hypermla/base/json_file.h"
#include "hypermla/profile/profile.h"

namespace hypermla {
namespace {

struct Writer;

template <class T>
concept HasFields = requires(Writer& field, T& object) {
  fields(field, object);
};

struct Writer {
  template <class T>
  Writer& operator()(const char* key, T& value, bool written = true) {
    if (written) json[key] = to_json_of(value);
    return *this;
  }
  template <class T>
  Writer& operator()(const char* key, std::optional<T>& value) {
    return value ? (*this)(key, *value) : *this;
  }

  template <class T>
  static Json to_json_of(T& value) {
    if constexpr (HasFields<T>) {
      Writer writer;
      fields(writer, value);
      return writer.json;
    } else {
      return value;
    }
  }
  template <class T>
  static Json to_json_of(std::vector<T>& values) {
    Json json = Json::array();
    for (T& value : values) json.push_back(to_json_of(value));
    return json;
  }

  Json json = Json::object();
};

struct Reader {
  template <class T>
  Reader& operator()(const char* key, T& value) {
    if (!json.contains(key)) fail("it has no '{}'", key);
    try {
      set(value, json[key]);
    } catch (const Json::exception&) {
      fail("its '{}' is of another type", key);
    }
    return *this;
  }
  template <class T>
  Reader& operator()(const char* key, T& value, bool /*written*/) {
    return json.contains(key) ? (*this)(key, value) : *this;
  }
  template <class T>
  Reader& operator()(const char* key, std::optional<T>& value) {
    return json.contains(key) ? (*this)(key, value.emplace()) : *this;
  }

  template <class T>
  static void set(T& value, const Json& from) {
    if constexpr (HasFields<T>) {
      Reader reader{from};
      fields(reader, value);
    } else {
      from.get_to(value);
    }
  }
  static void set(Json& value, const Json& from) {  // the fields of a problem or of a tiling
    if (!from.is_object()) throw Json::type_error::create(302, "no object", &from);
    value = from;
  }
  template <class T>
  static void set(std::vector<T>& values, const Json& from) {
    if (!from.is_array()) throw Json::type_error::create(302, "no array", &from);
    for (const Json& one : from) set(values.emplace_back(), one);
  }

  const Json& json;
};

}  // namespace

void fields(auto& field, Cost& x) {
  double intensity = x.intensity();
  field("flops", x.flops)("bytes", x.bytes)("intensity", intensity);
}

void fields(auto& field, Times& x) {
  field("median_us", x.median_us)("low_us", x.low_us)("high_us", x.high_us)("repetitions", x.repetitions)(
      "sm_MHz", x.sm_mhz)("watts", x.watts)("tflops", x.tflops)("gbps", x.gbps)("roofline_fraction",
                                                                                x.roofline_fraction);
}

void fields(auto& field, Bottleneck& x) {
  field("class", x.kind)("confidence", x.confidence)("why", x.why)("evidence", x.evidence)("stage", x.stage,
                                                                                           !x.stage.empty());
}

void fields(auto& field, Issue& x) { field("name", x.name)("trigger", x.trigger)("why", x.why); }

void fields(auto& field, Opportunity& x) {
  field("id", x.id)("name", x.name)("gain_percent", x.gain_percent)("trigger", x.trigger)("why", x.why)(
      "card", x.card, !x.card.empty())("refuted", x.refuted, !x.refuted.empty())("stage", x.stage, !x.stage.empty());
}

void fields(auto& field, ProfileStage& x) {
  const bool is_group = !x.members.empty();
  const bool judged = x.bottleneck.has_value();
  field("name", x.name)("members", x.members, is_group)("partition", x.partition, !x.partition.empty())(
      "tiling", x.tiling)("rejected", x.rejected, !x.rejected.empty())("grid", x.grid)(
      "artifact", x.artifact, !is_group)("compiler", x.compiler, !x.compiler.empty())("registers", x.registers)(
      "frame_bytes", x.frame_bytes)("shared_bytes", x.shared_bytes)("flops", x.flops)("bytes", x.bytes)(
      "predicted_us", x.predicted_us)("bound", x.bound)("group", x.group, !x.group.empty())("processors", x.processors)(
      "burst", x.burst)("metrics", x.metrics, !x.metrics.empty())("metrics_source", x.metrics_source,
                                                                  !x.metrics.empty())("signals", x.signals, judged)(
      "classification", x.bottleneck)("issues", x.issues, judged);
}

void fields(auto& field, TimelineFigures::Kernel& x) {
  field("name", x.name)("runs", x.runs)("sum_us", x.sum_us)("mean_us", x.mean_us)("tensor_pct", x.tensor_pct)(
      "dram_pct", x.dram_pct)("bubble_pct", x.bubble_pct);
}

void fields(auto& field, TimelineFigures::Samples& x) { field("count", x.count)("interval_us", x.interval_us); }

void fields(auto& field, TimelineFigures::Overlap& x) { field("a", x.a)("b", x.b)("us", x.us)("share", x.share); }

void fields(auto& field, TimelineFigures::Gap& x) { field("us", x.us)("after", x.after)("before", x.before); }

void fields(auto& field, TimelineFigures::Step& x) { field("name", x.name)("us", x.us)("waited_us", x.waited_us); }

void fields(auto& field, TimelineFigures& x) {
  field("operations", x.operations)("streams", x.streams)("span_us", x.span_us)("busy_us", x.busy_us)(
      "sum_us", x.sum_us)("idle_us", x.idle_us)("concurrency", x.concurrency)("kernels", x.kernels)(
      "samples", x.samples)("no_samples", x.no_samples, !x.no_samples.empty())("overlaps", x.overlaps)("gaps", x.gaps)(
      "critical_path", x.critical_path);
}

void fields(auto& field, Profile::ProfiledDevice& x) {
  field("name", x.name)("arch", x.arch)("processors", x.processors)("driver", x.driver);
}

void fields(auto& field, Profile::Clocks& x) {
  field("sm_MHz", x.sm_mhz)("memory_MHz", x.memory_mhz)("locked", x.locked);
}

void fields(auto& field, Profile::Roofline& x) {
  field("peak_tflops", x.peak_tflops)("peak_gbps", x.peak_gbps)("ridge", x.ridge)("predicted_us", x.predicted_us)(
      "bound", x.bound)("matmul_burst_tflops", x.matmul_burst_tflops)(
      "matmul_sustained_tflops", x.matmul_sustained_tflops)("read_GBps", x.read_gbps)("copy_GBps", x.copy_gbps);
}

void fields(auto& field, Profile::Timing& x) { field("cold", x.cold)("burst", x.burst)("sustained", x.sustained); }

void fields(auto& field, Profile::Counters& x) {
  field("chip", x.chip)("passes", x.passes)("unknown", x.unknown, x.chip.has_value())(
      "missing_groups", x.missing_groups, !x.missing_groups.empty())("source", x.source)("attempts", x.attempts,
                                                                                         !x.attempts.empty());
}

void fields(auto& field, Profile::Check& x) { field("passed", x.passed)("relative_errors", x.relative_errors); }

struct NcuPage {
  std::string& report;
};
void fields(auto& field, NcuPage& x) { field("report", x.report); }

void fields(auto& field, Profile& x) {
  NcuPage ncu{x.ncu_report};
  field("schema", x.schema)("mode", x.mode)("date", x.date)("kernel", x.kernel)("version", x.version)(
      "label", x.label, !x.label.empty())("problem", x.problem)("device", x.device)("clocks", x.clocks)("seed", x.seed)(
      "check", x.check)("roofline", x.roofline)("cost", x.cost)("timing", x.timing)("stages", x.stages)(
      "host_us_per_run", x.host_us_per_run)("missing", x.missing, !x.missing.empty())("counters", x.counters)(
      "timeline", x.timeline)("ncu", ncu, !x.ncu_report.empty())("classification", x.bottleneck)(
      "opportunities", x.opportunities, x.bottleneck.has_value())("files", x.files, !x.files.empty());
}

std::string to_text(const Times& times) {
  return fmt::format("{:g} us ({:g} to {:g} us, {} repetitions)", times.median_us, times.low_us, times.high_us,
                     times.repetitions);
}

Json to_json(const Profile& profile) {
  Profile copy = profile;  // `fields` serves both directions
  return Writer::to_json_of(copy);
}

Profile profile_from_json(const Json& json) {
  Profile profile;
  Reader::set(profile, json);
  // Older runs are read; what a newer program wrote may mean something else.
  if (profile.schema < 1 || profile.schema > Profile::kSchema)
    fail("its schema is {}, and this program reads 1 to {}", profile.schema, Profile::kSchema);
  return profile;
}

Profile load_profile(const std::filesystem::path& path) {
  std::error_code ignored;
  const auto file = std::filesystem::is_directory(path, ignored) ? path / "profile.json" : path;
  const Json json = read_json(file);
  try {
    if (json.is_discarded()) fail("it is not JSON");
    Profile profile = profile_from_json(json);
    profile.timing.for_each([](const char* name, const Times& times) {
      if (!is_possible(times)) fail("its {} time is {}, which no run takes", name, to_text(times));
    });
    for (const ProfileStage& stage : profile.stages)  // the one field of a tiling that is read
      if (const auto asked = stage.tiling.find("occupancy"); asked != stage.tiling.end() && !asked->is_number())
        fail("'occupancy' of {} is {}, and no number", stage.name, asked->dump());
    return profile;
  } catch (const Error& error) {
    fail("{} is not a profile ({}); give the directory of a run below out/profiles, or its profile.json", file.string(),
         error.what());
  }
}

}  // namespace hypermla
