#include "hypermla/profile/metrics.h"

#include <algorithm>

#include "hypermla/base/error.h"
#include "hypermla/profile/csv.h"

namespace hypermla {

const std::vector<Counter>& counter_catalogue() {
  static const std::vector<Counter> catalogue = {
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
  for (const Counter& counter : counter_catalogue())
    if (std::string(counter.name).rfind("cpu_", 0) != 0) names.push_back(counter.name);
  return names;
}

const Counter* find_counter(const std::string& name) {
  const auto& all = counter_catalogue();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Counter& one) { return one.name == name; });
  return found == all.end() ? nullptr : &*found;
}

std::vector<Metric> metrics_of(const ProfileStage& stage) {
  std::vector<Metric> metrics;
  for (const auto& [name, label, unit, scale] : counter_catalogue())
    if (const auto counted = stage.metrics.find(name); counted != stage.metrics.end())
      metrics.push_back({name, label, unit, counted->second * scale});
  return metrics;
}

std::string raw_metrics_csv(const Profile& profile) {
  std::string text = "stage,metric,value,source\n";
  for (const ProfileStage& stage : profile.stages)
    for (const Metric& metric : metrics_of(stage))
      text += fmt::format("{},{},{},{}\n", csv_field(stage.name), metric.name, stage.metrics.at(metric.name),
                          stage.metrics_source);
  return text;
}

std::string formatted_metrics_csv(const Profile& profile) {
  std::string text = "stage,metric,value,unit,source\n";
  for (const ProfileStage& stage : profile.stages)
    for (const Metric& metric : metrics_of(stage))
      text += fmt::format("{},{},{:.6g},{},{}\n", csv_field(stage.name), csv_field(metric.label), metric.value,
                          metric.unit, stage.metrics_source);
  return text;
}

std::string roofline_metrics_csv(const Profile& profile) {
  constexpr const char* kSignals[] = {"time_us",
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
  for (const char* signal : kSignals) text += std::string(",") + signal;
  text += "\n";
  for (const ProfileStage& stage : profile.stages) {
    text += csv_field(stage.name);
    for (const char* name : kSignals) {
      const auto signal = stage.signals.find(name);
      text += signal == stage.signals.end() ? "," : fmt::format(",{:.6g}", signal->second);
    }
    text += "\n";
  }
  return text;
}

}  // namespace hypermla
