#include "hypermla/profile/signals.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "hypermla/base/error.h"
#include "hypermla/profile/metrics.h"

namespace hypermla {
namespace {

constexpr double kConcurrentShare = 0.5;  // less is the end of one kernel under the start of the next

// Beside the counters. Percentages are of the peak over the elapsed time, or of the time.
const std::set<std::string>& quantities() {
  static const std::set<std::string> names = {"achieved_compute_pct",
                                              "achieved_memory_pct",
                                              "alone_pct",
                                              "bank_conflict_pct",
                                              "blocks",
                                              "bubble_pct",
                                              "bytes",
                                              "causal",
                                              "dram_bytes",
                                              "dram_over_algorithmic_bytes",
                                              "dram_pct",
                                              "executed_flops",
                                              "executed_over_algorithmic_flops",
                                              "flops",
                                              "frame_bytes",
                                              "gbps",
                                              "group_waves",
                                              "intensity",
                                              "intensity_over_ridge",
                                              "issue_pct",
                                              "l2_hit_pct",
                                              "memory_pct",
                                              "occupancy_pct",
                                              "predicted_us",
                                              "registers",
                                              "roofline_fraction",
                                              "shared_bytes",
                                              "sm_busy_pct",
                                              "sm_bytes_over_algorithmic",
                                              "sm_idle_pct",
                                              "spill_instructions",
                                              "stall_barrier_pct",
                                              "stall_memory_pct",
                                              "stall_shared_pct",
                                              "stall_wgmma_pct",
                                              "sustained_over_burst",
                                              "tail_pct",
                                              "tensor_pct",
                                              "tflops",
                                              "time_us",
                                              "tma_share_pct",
                                              "waves",
                                              "xu_pct"};
  return names;
}

double blocks(const ProfileStage& stage) {
  return double(stage.grid[0]) * double(stage.grid[1]) * double(stage.grid[2]);
}

// Signals under construction. A quantity that some missing signal enters is NaN, and no signal.
class StageSignals {
 public:
  // Of kernels that run at once the group is judged as one stage. A member was measured alone, on a device that it does
  // not fill, so that idle SMs say nothing about it.
  StageSignals(const Profile& profile, const ProfileStage& stage)
      : profile_(profile), stage_(stage), is_member_(!stage.group.empty()) {
    for (const ProfileStage& other : profile.stages)
      if (!stage.members.empty() && other.group == stage.name) members_.push_back(&other);
  }

  Signals all() {
    signals_ = stage_.metrics;
    put_cost();
    put_time();
    put_counted();
    put_sampled();
    put_time_alone();
    put_traffic();
    put_grid();
    const Json& problem = profile_.problem;
    put("causal", problem.contains("causal") && problem["causal"] == true ? 1 : 0);
    return signals_;
  }

 private:
  void put(const std::string& name, double value) {
    if (!quantities().count(name)) fail("the signal '{}' is not listed in profile/signals.cpp", name);
    if (std::isfinite(value)) signals_[name] = value;
  }
  void put(const std::string& name, const std::optional<int>& value) {
    if (value) put(name, double(*value));
  }
  double get(const std::string& name) const {
    const auto found = signals_.find(name);
    return found == signals_.end() ? std::nan("") : found->second;
  }
  void put_largest(const std::string& name, double value) { put(name, std::fmax(value, get(name))); }

  void put_cost() {
    put("flops", stage_.flops);
    put("bytes", stage_.bytes);
    put("predicted_us", stage_.predicted_us);
    put("registers", stage_.registers);
    put("frame_bytes", stage_.frame_bytes);
    put("shared_bytes", stage_.shared_bytes);
    for (const ProfileStage* member : members_) {
      if (member->registers) put_largest("registers", *member->registers);
      if (member->frame_bytes) put_largest("frame_bytes", *member->frame_bytes);
    }
  }

  // The stage alone where it was timed, else the whole where it is the only stage.
  void put_time() {
    const auto& timing = profile_.timing;
    if (stage_.burst)
      put("time_us", stage_.burst->median_us);
    else if (profile_.stages.size() == 1)
      put("time_us", timing.burst.median_us);
    if (timing.sustained) put("sustained_over_burst", timing.sustained->median_us / timing.burst.median_us);
    put("tflops", get("flops") / get("time_us") * 1e-6);
    put("gbps", get("bytes") / get("time_us") * 1e-3);
    put("intensity", get("flops") / get("bytes"));
    put("roofline_fraction", get("predicted_us") / get("time_us"));
    put("achieved_compute_pct", 100 * get("tflops") / profile_.roofline.peak_tflops);
    put("achieved_memory_pct", 100 * get("gbps") / profile_.roofline.peak_gbps);
    put("intensity_over_ridge", get("intensity") / profile_.roofline.ridge);
  }

  void put_counted() {
    constexpr std::pair<const char*, const char*> kNames[] = {
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
    for (const auto& [name, counter] : kNames) put(name, get(counter));
    if (!is_member_) put("sm_idle_pct", 100 - get("sm_busy_pct"));
  }

  // On a timeline, where nothing was counted.
  void put_sampled() {
    if (!profile_.timeline) return;
    for (const TimelineFigures::Kernel& kernel : profile_.timeline->kernels) {
      if (kernel.name != stage_.name) continue;
      for (const auto& [name, value] : {std::pair{"tensor_pct", kernel.tensor_pct},
                                        {"dram_pct", kernel.dram_pct},
                                        {"bubble_pct", kernel.bubble_pct}})
        if (value && !signals_.count(name)) put(name, *value);
    }
  }

  // Of stages that run at the same time: how long this one goes on without the other.
  void put_time_alone() {
    if (!profile_.timeline) return;
    for (const TimelineFigures::Overlap& pair : profile_.timeline->overlaps)
      for (const TimelineFigures::Kernel& kernel : profile_.timeline->kernels) {
        const bool mine = kernel.name == stage_.name || std::any_of(members_.begin(), members_.end(), [&](auto* one) {
                            return one->name == kernel.name;
                          });
        if (mine && (pair.a == kernel.name || pair.b == kernel.name) && pair.share >= kConcurrentShare)
          put_largest("alone_pct", 100 * std::max(0.0, 1 - pair.us / kernel.sum_us));
      }
  }

  void put_traffic() {
    put("dram_bytes", get("dram__bytes_read.sum") + get("dram__bytes_write.sum"));
    put("dram_over_algorithmic_bytes", get("dram_bytes") / get("bytes"));
    const double to_sms = get("l1tex__m_xbar2l1tex_read_bytes.sum");
    put("sm_bytes_over_algorithmic", to_sms / get("bytes"));
    put("tma_share_pct", 100 * get("l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum") / to_sms);
    put("spill_instructions", get("smsp__inst_executed_op_local_ld.sum") + get("smsp__inst_executed_op_local_st.sum"));
    put("bank_conflict_pct", 100 * get("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum") /
                                 get("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"));
    double executed = 0;
    for (const char* counter : {"sm__ops_path_tensor_src_bf16_dst_fp32.sum", "sm__ops_path_tensor_src_fp16.sum",
                                "sm__ops_path_tensor_src_fp8.sum"})
      executed += signals_.count(counter) ? get(counter) : 0;
    if (!signals_.count("tensor_pct") || !(executed > 0)) return;
    put("executed_flops", executed);
    put("executed_over_algorithmic_flops", executed / get("flops"));
  }

  // How often the blocks fill the processors: of a group and of a kernel alone all, of a member its own.
  double waves(const ProfileStage& kernel) const {
    // A tiling that asks for several blocks per SM says so; the others are large enough to run alone.
    const double together = std::max(1.0, kernel.tiling.value("occupancy", 1.0));
    return blocks(kernel) / (stage_.processors.value_or(profile_.device.processors) * together);
  }

  void put_grid() {
    put("blocks", blocks(stage_));
    if (!members_.empty()) {
      put("group_waves", std::transform_reduce(members_.begin(), members_.end(), 0.0, std::plus<>(),
                                               [&](auto* member) { return waves(*member); }));
      put("waves", get("group_waves"));
    } else if (!is_member_ || stage_.processors) {
      put("waves", waves(stage_));
    }
    put("tail_pct", 100 * (1 - get("waves") / std::ceil(get("waves"))));
  }

  const Profile& profile_;
  const ProfileStage& stage_;
  const bool is_member_;
  std::vector<const ProfileStage*> members_;
  Signals signals_;
};

}  // namespace

std::set<std::string> signal_names() {
  std::set<std::string> names = quantities();
  for (const Counter& counter : counter_catalogue()) names.insert(counter.name);
  return names;
}

Signals stage_signals(const Profile& profile, const ProfileStage& stage) { return StageSignals(profile, stage).all(); }

}  // namespace hypermla
