#include "hypermla/profile/rules.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"

namespace hypermla {
namespace {

constexpr int kRulesSchema = 1;
constexpr double kConcurrentShare = 0.5;  // less is the end of one kernel under the start of the next

}  // namespace

Rules::Rule Rules::parse_rule(const Json& json, const std::string& file, Kind kind) try {
  Rule rule;
  rule.name = json.at(kind == Kind::classification ? "class" : "name");
  if (kind == Kind::opportunity) rule.id = json.at("id");
  rule.why = json.at("why");
  for (const Json& when : json.at("when")) {
    Condition condition{when.at(0), when.at(1), when.at(2), when.at(3)};
    if (condition.op != "<" && condition.op != ">=")
      fail("{}: '{}' compares with '{}'; use < or >=", file, rule.name, condition.op);
    if (!(condition.margin > 0)) fail("{}: '{}' has a margin that is not positive", file, rule.name);
    rule.when.push_back(condition);
  }
  if (rule.when.empty()) fail("{}: '{}' has no condition", file, rule.name);
  if (kind == Kind::opportunity) {
    rule.gain = json.at("gain");
    const std::string formula = rule.gain.at(0);
    if (formula != "toward" && formula != "excess" && formula != "share")
      fail("{}: '{}' estimates its gain by '{}'; use toward, excess or share", file, rule.name, formula);
    rule.gain.at(1).get<std::string>();
    rule.gain.at(2).get<double>();
  }
  return rule;
} catch (const Json::exception& error) {
  fail("{}: the rule {} is not as src/hypermla/profile/rules.h describes ({})", file, json.dump(), error.what());
}

Rules Rules::parse(const Json& json, const std::string& name) {
  if (json.value("schema", 0) != kRulesSchema) fail("{} is not a file of profile rules of schema {}", name, kRulesSchema);
  Rules rules;
  auto parse_all = [&](const char* list, Kind kind) {
    std::vector<Rule> parsed;
    for (const Json& rule : json.value(list, Json::array())) parsed.push_back(parse_rule(rule, name, kind));
    return parsed;
  };
  rules.classes_ = parse_all("classes", Kind::classification);
  rules.issues_ = parse_all("issues", Kind::issue);
  rules.opportunities_ = parse_all("opportunities", Kind::opportunity);
  return rules;
}

Rules Rules::load(const std::filesystem::path& path) {
  Json json = Json::parse(read_file(path), nullptr, false);
  if (json.is_discarded()) fail("{} is not JSON; restore it from the repository", path.string());
  return parse(json, path.string());
}

bool Rules::holds(const Condition& condition, const Signals& signals) {
  const auto found = signals.find(condition.signal);
  if (found == signals.end()) return false;
  return condition.op == "<" ? found->second < condition.value : found->second >= condition.value;
}

bool Rules::holds(const Rule& rule, const Signals& signals) {
  return std::all_of(rule.when.begin(), rule.when.end(), [&](const Condition& one) { return holds(one, signals); });
}

std::string Rules::describe(const Condition& condition, const Signals& signals) {
  return fmt::format("{} = {:.4g} {} {:g}", condition.signal, signals.at(condition.signal), condition.op,
                     condition.value);
}

Json Rules::classify(const Signals& signals) const {
  for (const Rule& rule : classes_) {
    if (!holds(rule, signals)) continue;
    double distance = HUGE_VAL;
    Json evidence = Json::array();
    for (const Condition& condition : rule.when) {
      distance = std::min(distance, std::abs(signals.at(condition.signal) - condition.value) / condition.margin);
      evidence.push_back(describe(condition, signals));
    }
    return {{"class", rule.name},
            {"confidence", distance >= 1     ? "high"
                           : distance >= 0.4 ? "medium"
                                             : "low"},
            {"why", rule.why},
            {"evidence", evidence}};
  }
  return {{"class", "unknown"},
          {"confidence", "low"},
          {"why", "no rule applies to what was measured"},
          {"evidence", Json::array()}};
}

Json Rules::issues(const Signals& signals) const {
  Json all = Json::array();
  for (const Rule& rule : issues_)
    if (holds(rule, signals))
      all.push_back({{"name", rule.name}, {"trigger", describe(rule.when.front(), signals)}, {"why", rule.why}});
  return all;
}

// The share of the time that would go, as a fraction.
double Rules::gain(const Rule& rule, const Signals& signals) {
  const std::string kind = rule.gain[0];
  const auto found = signals.find(rule.gain[1].get<std::string>());
  if (found == signals.end()) return 0;
  const double value = found->second, parameter = rule.gain[2];
  double share = 0;
  if (kind == "toward")
    share = 1 - value / parameter;  // a rate that rises to `parameter`
  else if (kind == "excess")
    share = value > 0 ? 1 - parameter / value : 0;  // an amount that falls to `parameter`
  else
    share = value / 100 * parameter;  // `parameter` of a percentage of the time goes
  // Nothing gets faster than the roofline.
  if (const auto fraction = signals.find("roofline_fraction"); fraction != signals.end())
    share = std::min(share, 1 - fraction->second);
  return std::clamp(share, 0.0, 1.0);
}

Json Rules::opportunities(const Signals& signals, std::size_t count) const {
  std::vector<std::pair<double, Json>> found;
  for (const Rule& rule : opportunities_) {
    if (!holds(rule, signals)) continue;
    const double percent = std::round(100 * gain(rule, signals));
    if (percent < 1) continue;
    found.emplace_back(percent, Json{{"id", rule.id},
                                     {"name", rule.name},
                                     {"gain_percent", percent},
                                     {"trigger", describe(rule.when.front(), signals)},
                                     {"why", rule.why}});
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  Json best = Json::array();
  for (std::size_t i = 0; i < std::min(count, found.size()); ++i) best.push_back(found[i].second);
  return best;
}

std::vector<std::string> Rules::signals() const {
  std::set<std::string> names;
  for (const auto* rules : {&classes_, &issues_, &opportunities_})
    for (const Rule& rule : *rules) {
      for (const Condition& condition : rule.when) names.insert(condition.signal);
      if (rule.gain.is_array()) names.insert(rule.gain[1].get<std::string>());
    }
  return {names.begin(), names.end()};
}

Signals stage_signals(const Json& profile, std::size_t index) {
  const Json& stage = profile.at("stages").at(index);
  // Of kernels that run at once the group is judged as one stage. A member was measured alone, on a device that it does not
  // fill, so that idle SMs say nothing about it.
  const bool is_member = stage.contains("group");
  std::vector<Json> members;
  for (const Json& other : profile["stages"])
    if (stage.contains("members") && other.value("group", "") == stage["name"]) members.push_back(other);
  Signals signals;
  auto put = [&](const std::string& name, double value) {
    if (std::isfinite(value)) signals[name] = value;
  };
  auto get = [&](const std::string& name) {
    const auto found = signals.find(name);
    return found == signals.end() ? std::nan("") : found->second;
  };
  const Json metrics = stage.value("metrics", Json::object());
  for (const auto& [name, value] : metrics.items())
    if (value.is_number()) put(name, value);
  for (const char* name : {"flops", "bytes", "predicted_us", "registers", "frame_bytes", "shared_bytes"})
    if (stage.contains(name) && stage[name].is_number()) put(name, stage[name]);
  for (const Json& member : members)
    for (const char* name : {"registers", "frame_bytes"})
      if (member.contains(name)) put(name, std::max(member[name].get<double>(), signals.count(name) ? get(name) : 0.0));

  // The stage alone where it was timed, else the whole where it is the only stage.
  const Json timing = profile.value("timing", Json::object());
  if (stage.contains("burst"))
    put("time_us", stage["burst"].at("median_us"));
  else if (profile["stages"].size() == 1)
    for (const char* flavour : {"burst", "cold"})
      if (timing.contains(flavour) && !signals.count("time_us")) put("time_us", timing[flavour].at("median_us"));
  if (timing.contains("sustained") && timing.contains("burst"))
    put("sustained_over_burst",
        timing["sustained"].at("median_us").get<double>() / timing["burst"].at("median_us").get<double>());

  put("tflops", get("flops") / get("time_us") * 1e-6);
  put("gbps", get("bytes") / get("time_us") * 1e-3);
  put("intensity", get("flops") / get("bytes"));
  put("roofline_fraction", get("predicted_us") / get("time_us"));
  const Json roofline = profile.value("roofline", Json::object());
  if (roofline.contains("peak_tflops")) {
    put("achieved_compute_pct", 100 * get("tflops") / roofline["peak_tflops"].get<double>());
    put("achieved_memory_pct", 100 * get("gbps") / roofline["peak_gbps"].get<double>());
    put("intensity_over_ridge", get("intensity") / roofline["ridge"].get<double>());
  }

  const std::pair<const char*, const char*> names[] = {
      {"tensor_pct", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"},
      {"dram_pct", "dram__throughput.avg.pct_of_peak_sustained_elapsed"},
      {"memory_pct", "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"},
      {"occupancy_pct", "sm__warps_active.avg.pct_of_peak_sustained_active"},
      {"l2_hit_pct", "lts__t_sector_hit_rate.pct"},
      {"xu_pct", "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active"},
      {"issue_pct", "smsp__issue_active.avg.pct_of_peak_sustained_active"},
      {"sm_busy_pct", "sm__cycles_active.avg.pct_of_peak_sustained_elapsed"},
      {"stall_wgmma_pct", "smsp__warp_issue_stalled_gmma_per_warp_active.pct"},
      {"stall_memory_pct", "smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct"},
      {"stall_shared_pct", "smsp__warp_issue_stalled_short_scoreboard_per_warp_active.pct"},
      {"stall_barrier_pct", "smsp__warp_issue_stalled_barrier_per_warp_active.pct"}};
  for (const auto& [name, metric] : names) put(name, get(metric));
  // Sampled on a timeline, where nothing was counted.
  for (const Json& kernel : profile.value("timeline", Json::object()).value("kernels", Json::array()))
    for (const char* name : {"tensor_pct", "dram_pct", "bubble_pct"})
      if (kernel["name"] == stage["name"] && kernel.contains(name) && !signals.count(name)) put(name, kernel[name]);
  // Of stages that run at the same time: how long this one goes on without the other.
  for (const Json& pair : profile.value("timeline", Json::object()).value("overlaps", Json::array()))
    for (const Json& kernel : profile["timeline"]["kernels"]) {
      const bool mine =
          kernel["name"] == stage["name"] ||
          std::any_of(members.begin(), members.end(), [&](const Json& one) { return one["name"] == kernel["name"]; });
      if (!mine || (pair["a"] != kernel["name"] && pair["b"] != kernel["name"]) || pair["share"] < kConcurrentShare)
        continue;
      const double alone = 100 * (1 - pair["us"].get<double>() / kernel["sum_us"].get<double>());
      put("alone_pct", std::max(alone, signals.count("alone_pct") ? get("alone_pct") : 0.0));
    }
  if (!is_member) put("sm_idle_pct", 100 - get("sm_busy_pct"));
  put("dram_bytes", get("dram__bytes_read.sum") + get("dram__bytes_write.sum"));
  put("dram_over_algorithmic_bytes", get("dram_bytes") / get("bytes"));
  put("sm_bytes_over_algorithmic", get("l1tex__m_xbar2l1tex_read_bytes.sum") / get("bytes"));
  put("tma_share_pct",
      100 * get("l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum") / get("l1tex__m_xbar2l1tex_read_bytes.sum"));
  put("spill_instructions", get("smsp__inst_executed_op_local_ld.sum") + get("smsp__inst_executed_op_local_st.sum"));
  put("bank_conflict_pct", 100 * get("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum") /
                               get("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"));
  double executed = 0;
  for (const char* type : {"bf16_dst_fp32", "fp16", "fp8"})
    if (const double count = get(fmt::format("sm__ops_path_tensor_src_{}.sum", type)); std::isfinite(count))
      executed += count;
  if (signals.count("tensor_pct") && executed > 0) {
    put("executed_flops", executed);
    put("executed_over_algorithmic_flops", executed / get("flops"));
  }

  if (stage.contains("grid")) {
    double blocks = 1;
    for (const Json& extent : stage["grid"]) blocks *= extent.get<double>();
    put("blocks", blocks);
    // Of a group: of the whole device; of a member: of its partition.
    const double processors = stage.value("processors", profile.at("device").at("processors").get<double>());
    auto waves = [&](const Json& of) {
      double count = 1;
      for (const Json& extent : of.at("grid")) count *= extent.get<double>();
      // A tiling that asks for several blocks per SM says so; the others are large enough to run alone.
      return count / (processors * std::max(1.0, of.value("tiling", Json::object()).value("occupancy", 1.0)));
    };
    if (!members.empty()) {
      double sum = 0;
      for (const Json& member : members) sum += waves(member);
      put("waves", sum);
      put("group_waves", sum);
    } else if (!is_member || stage.contains("processors")) {
      put("waves", waves(stage));
    }
    put("tail_pct", 100 * (1 - get("waves") / std::ceil(get("waves"))));
  }
  const Json problem = profile.value("problem", Json::object());
  put("causal", problem.contains("causal") && problem["causal"] == true ? 1 : 0);
  return signals;
}

void assess(Json& profile, const Rules& rules) {
  double longest = -1;
  for (std::size_t i = 0; i < profile.at("stages").size(); ++i) {
    const Signals signals = stage_signals(profile, i);
    Json& stage = profile["stages"][i];
    stage["signals"] = signals;
    stage["classification"] = rules.classify(signals);
    stage["issues"] = rules.issues(signals);
    const auto time = signals.find("time_us");
    const double seconds = time == signals.end() ? 0 : time->second;
    if (seconds <= longest || stage.contains("group")) continue;
    longest = seconds;
    profile["classification"] = stage["classification"];
    profile["classification"]["stage"] = stage["name"];
    profile["opportunities"] = rules.opportunities(signals, 3);
  }
}

}  // namespace hypermla
