#include "hypermla/profile/metrics.h"

#include <algorithm>

#include "hypermla/base/error.h"

namespace hypermla {

const std::vector<Metric>& metric_catalogue() {
  static const std::vector<Metric> catalogue = {
      {"gpu__time_duration.sum", "duration", "us", 1e-3},
      {"gpc__cycles_elapsed.max", "cycles", "", 1},
      {"gpc__cycles_elapsed.avg.per_second", "SM clock", "MHz", 1e-6},
      {"dram__cycles_elapsed.avg.per_second", "DRAM clock", "MHz", 1e-6},
      {"sm__cycles_active.avg.pct_of_peak_sustained_elapsed", "SMs busy", "%"},
      {"sm__throughput.avg.pct_of_peak_sustained_elapsed", "compute throughput", "%"},
      {"gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed", "memory throughput", "%"},

      {"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", "tensor pipe", "%"},
      {"sm__inst_executed_pipe_tensor_op_gmma.sum", "wgmma instructions", "", 1},
      {"sm__ops_path_tensor_src_bf16_dst_fp32.sum", "tensor operations, bfloat16", "GFLOP", 1e-9},
      {"sm__ops_path_tensor_src_fp16.sum", "tensor operations, float16", "GFLOP", 1e-9},
      {"sm__ops_path_tensor_src_fp8.sum", "tensor operations, float8", "GFLOP", 1e-9},
      {"sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", "special functions (exp2)", "%"},
      {"smsp__issue_active.avg.pct_of_peak_sustained_active", "issue slots", "%"},
      {"sm__inst_executed.avg.per_cycle_active", "instructions per cycle", "", 1},
      {"sm__warps_active.avg.pct_of_peak_sustained_active", "occupancy", "%"},

      {"dram__throughput.avg.pct_of_peak_sustained_elapsed", "DRAM throughput", "%"},
      {"dram__bytes_read.sum", "DRAM read", "GB", 1e-9},
      {"dram__bytes_write.sum", "DRAM written", "GB", 1e-9},
      {"lts__t_sector_hit_rate.pct", "L2 hits", "%"},
      {"lts__t_bytes.sum", "L2 traffic", "GB", 1e-9},
      {"l1tex__m_xbar2l1tex_read_bytes.sum", "L2 to SMs", "GB", 1e-9},
      {"l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum", "of that by TMA", "GB", 1e-9},
      {"l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "shared-memory wavefronts", "", 1},
      {"l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "shared-memory bank conflicts", "", 1},
      {"smsp__inst_executed_op_local_ld.sum", "local loads (spills)", "", 1},
      {"smsp__inst_executed_op_local_st.sum", "local stores (spills)", "", 1},

      {"smsp__warp_issue_stalled_gmma_per_warp_active.pct", "waits for wgmma", "%"},
      {"smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct", "waits for memory", "%"},
      {"smsp__warp_issue_stalled_short_scoreboard_per_warp_active.pct", "waits for shared memory or exp2", "%"},
      {"smsp__warp_issue_stalled_barrier_per_warp_active.pct", "waits at a barrier", "%"},
      {"smsp__warp_issue_stalled_wait_per_warp_active.pct", "waits for a fixed latency", "%"},
      {"smsp__warp_issue_stalled_math_pipe_throttle_per_warp_active.pct", "waits for a math pipe", "%"},
      {"smsp__warp_issue_stalled_mio_throttle_per_warp_active.pct", "waits for the MIO queue", "%"},
      {"smsp__warp_issue_stalled_lg_throttle_per_warp_active.pct", "waits for the load queue", "%"},
      {"smsp__warp_issue_stalled_branch_resolving_per_warp_active.pct", "waits for a branch", "%"},
      {"smsp__warp_issue_stalled_no_instruction_per_warp_active.pct", "waits for instructions", "%"},
      {"smsp__warp_issue_stalled_sleeping_per_warp_active.pct", "sleeps", "%"},
      {"smsp__warp_issue_stalled_not_selected_per_warp_active.pct", "ready, another warp issued", "%"},
      {"smsp__warp_issue_stalled_selected_per_warp_active.pct", "issues", "%"},

      // Of a CPU, from perf_event_open.
      {"cpu_cycles", "cycles", "", 1},
      {"cpu_instructions", "instructions", "", 1},
      {"cpu_cache_misses", "last-level cache misses", "", 1},
      {"cpu_branch_misses", "branch misses", "", 1},
  };
  return catalogue;
}

std::vector<std::string> metric_names() {
  std::vector<std::string> names;
  for (const Metric& metric : metric_catalogue())
    if (std::string(metric.name).rfind("cpu_", 0) != 0) names.push_back(metric.name);
  return names;
}

const Metric* find_metric(const std::string& name) {
  const auto& all = metric_catalogue();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Metric& metric) { return metric.name == name; });
  return found == all.end() ? nullptr : &*found;
}

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

namespace {

// Calls `row` for every metric of every stage, in the order of the catalogue.
template <class Row>
void for_each_metric(const Json& profile, Row row) {
  for (const Json& stage : profile.at("stages")) {
    if (!stage.contains("metrics")) continue;
    for (const Metric& metric : metric_catalogue())
      if (stage["metrics"].contains(metric.name))
        row(stage.at("name").get<std::string>(), metric, stage["metrics"][metric.name].get<double>(),
            stage.at("metrics_source").get<std::string>());
  }
}

}  // namespace

std::string raw_metrics_csv(const Json& profile) {
  std::string text = "stage,metric,value,source\n";
  for_each_metric(profile,
                  [&](const std::string& stage, const Metric& metric, double value, const std::string& source) {
                    text += fmt::format("{},{},{},{}\n", csv_field(stage), metric.name, value, source);
                  });
  return text;
}

std::string formatted_metrics_csv(const Json& profile) {
  std::string text = "stage,metric,value,unit,source\n";
  for_each_metric(profile,
                  [&](const std::string& stage, const Metric& metric, double value, const std::string& source) {
                    text += fmt::format("{},{},{:.6g},{},{}\n", csv_field(stage), csv_field(metric.label),
                                        value * metric.scale, metric.unit, source);
                  });
  return text;
}

std::string roofline_metrics_csv(const Json& profile) {
  const std::vector<const char*> signals = {"time_us",
                                            "predicted_us",
                                            "roofline_fraction",
                                            "flops",
                                            "executed_flops",
                                            "executed_over_algorithmic_flops",
                                            "tflops",
                                            "tensor_pct",
                                            "bytes",
                                            "dram_bytes",
                                            "dram_over_algorithmic_bytes",
                                            "gbps",
                                            "dram_pct",
                                            "intensity"};
  std::string text = "stage";
  for (const char* signal : signals) text += std::string(",") + signal;
  text += "\n";
  for (const Json& stage : profile.at("stages")) {
    text += csv_field(stage.at("name"));
    for (const char* name : signals) {
      const bool known = stage.contains("signals") && stage["signals"].contains(name);
      text += known ? fmt::format(",{:.6g}", stage["signals"][name].get<double>()) : ",";
    }
    text += "\n";
  }
  return text;
}

}  // namespace hypermla
