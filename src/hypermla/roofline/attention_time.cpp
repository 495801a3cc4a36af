#include "hypermla/roofline/attention_time.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "hypermla/base/error.h"

namespace hypermla {
namespace {

// What one kernel reaches with one size of tile, as parts of the ceilings of a device.
struct Figures {
  std::string_view kernel;
  int rows;                 // of a tile: rows are padded to whole tiles
  double burst, sustained;  // tensor work on padded rows, of matmul_{burst,sustained}_tflops
  double memory;            // of read_GBps
  // The part of the processors that must read to reach `memory`, where a block owns its tile; 0: work is cut over all
  // processors.
  double readers;
  // What start, merges and end cost, in launches: where tiles fill all processors, half of them, or fewer.
  double full, half, few;
};

// All from an H200 with 790 TFLOP/s (725 sustained) and 4580 GB/s; other devices are taken to reach the same parts. A
// kernel that is listed twice has tiles of several sizes.
const Figures kFigures[] = {
    // results/nvidia-h200/cute-flash_mla-*.json: b32 s2..s64 in 104..2903 us, s16 and s32 sustained 843 and 1680 us; merges of
    // cut tiles from b1 t4096 (10.9 us), b1 t131072 (60.4 us), b32 s1 (62.4 us) and h64 (44.0 us).
    {"cute.mla.flash_mla", 64, 1.01, 0.97, 0.92, 0, 0.8, 2.3, 3.4},
    // cute-flash_mla_v1-*.json: b1 10.5 us, h16 38.3 us; 1.05 and 0.92 us a tile of 32 or 16 rows and 64 tokens.
    {"cute.mla.flash_mla_v1", 16, 0.42, 0.42, 0.95, 0, 2, 1.5, 2.4},
    {"cute.mla.flash_mla_v1", 32, 0.71, 0.71, 0.92, 0, 2, 1.5, 3},
    // results/nvidia-h200/flash_mla-b32-s16.json: 1180 us, 1288 us sustained; docs/kernels/flash-mla.md, s = 1 to 8.
    {"cutile.mla.flash_mla", 64, 0.655, 0.655, 0.92, 0.73, 1, 1, 1},
    // results/nvidia-h200/flash_mla_split_kv-b32-s1.json: 84.8 us, stage 1 as above; merges below.
    {"cutile.mla.flash_mla_split_kv", 64, 0.655, 0.655, 0.92, 0.73, 2.8, 2.8, 2.8},
    // docs/kernels/cute-flash-attention.md: 1 x 16384 causal 13191 us, b32 s128 2051 us, 4 x 4096 3584 us (sustained
    // 4253). 40 of 132 SMs read at 0.88 of the full rate (docs/devices/nvidia-h200.md).
    {"cute.mla.flash_attention", 128, 1.08, 0.955, 0.975, 0.3, 1, 1, 1},
    // docs/kernels/cute-flash-attention-v1.md: 1892, 1920, 1954 us at s = 16, 32, 64, and from 40 SMs 640, 870 and 920
    // cycles for 64 tokens of a head; the envelope of 2026-11-21: s = 128 2788 us (3011), s = 256 4544 us (5315).
    {"cute.mla.flash_attention_v1", 16, 0.3, 0.3, 0.975, 0.3, 1, 1, 1},
    {"cute.mla.flash_attention_v1", 32, 0.45, 0.45, 0.975, 0.3, 1, 1, 1},
    {"cute.mla.flash_attention_v1", 64, 0.80, 0.765, 0.975, 0.3, 1, 1, 1},
    // results/nvidia-h200/flash_attention-*.json: b1 s512 t8192 513 us (592), b32 s128 2413 us (2881); tiles of 64 rows
    // at s = 128 took 3.31 ms, and of 32 rows, by mma.sync, 2.54 ms at s = 32 (docs/log/flash-attention.md), which is
    // used for those of 16 rows, too; 0.975 of the reads at s = 32 and 64, from 96 SMs on, sustained, too (that
    // envelope).
    {"cutile.mla.flash_attention", 16, 0.2, 0.2, 0.975, 0.73, 1, 1, 1},
    {"cutile.mla.flash_attention", 64, 0.66, 0.66, 0.975, 0.73, 1, 1, 1},
    {"cutile.mla.flash_attention", 128, 0.88, 0.825, 0.975, 0.73, 1, 1, 1},
    // The same over a prefix, which the hybrid cuts until its tiles fill the processors (docs/kernels/cute-mla-var6-plus.md).
    {"cute.prefix_part", 128, 1.08, 0.955, 0.975, 0, 1, 1, 1},
    // The decompressed part of a hybrid that runs its parts at once, fitted to what v5 and v4 took in the envelope of
    // 2026-11-21 (an older results/nvidia-h200/envelope.json), 1495 and 2311 us (1645, 2443) at s = 32 and 64, 2539 and
    // 4818 (2565, 4848) at 64 and 128.
    {"cute.decompressed_part", 16, 0.3, 0.3, 0.92, 0.3, 1, 1, 1},
    {"cute.decompressed_part", 32, 0.65, 0.62, 0.92, 0.3, 1, 1, 1},
    {"cute.decompressed_part", 64, 0.70, 0.70, 0.92, 0.3, 1, 1, 1},
    {"cutile.decompressed_part", 64, 0.51, 0.54, 0.975, 0.73, 1, 1, 1},
};

// The stage behind the latent path, of read_GBps. results/nvidia-h200/output_decompression-b32-s16.json: 33.1 us for 101 MB by
// CUDA Tile; cute-decompress_combine-b32-s32.json: 60.9 us for 217 MB.
constexpr double kDecompressionTensor = 0.88;
double decompression_reads(bool cute) { return cute ? 0.80 : 0.66; }

// The merge of flash_mla_split_kv, in launches per split: b32 s1 (2 splits) 5 us behind stage 1, b8 t8192 (8) 5 us, b1 t65536
// (64) 25 us (docs/kernels/flash-mla-split-kv.md).
constexpr double kMergeOfSplit = 0.1;

// Two paths at once slow each other down in L2 and memory, by 7 to 10 % each; on partitions one also ends before the
// other (docs/choice.md).
double overlap_of(std::string_view kernel) {
  if (kernel == "cute.mla.mla_var6_plus_v5") return 0.92;
  // Both paths in one block wait for each other. Against v4, s = 16 and 32 (docs/kernels/mla-var6-plus.md): 3.6 and 3.2
  // times its time, 2.4 and 2.2, 1.7 and 2.2, and more with few decompressed tokens; the base version 6.1 and 2.3.
  if (kernel == "cutile.mla.mla_var6_plus") return 0.93 / 2.1;
  if (kernel == "cutile.mla.mla_var6_plus_v1") return 0.93 / 3.2;
  if (kernel == "cutile.mla.mla_var6_plus_v2") return 0.93 / 2.4;
  if (kernel == "cutile.mla.mla_var6_plus_v3") return 0.93 / 2.0;
  return 0.93;
}

// Most measured times lie within this of the model, so a hybrid must promise a larger gain.
constexpr double kMargin = 1.05;

// How a version of mla_var6_plus runs its parts.
enum class Together { at_once, in_halves, in_turn };
Together together(std::string_view kernel) {
  // The base version of CUDA Tile gives each part half of the processors; that of Hopper is a pipeline of the two
  // kernels.
  if (kernel == "cutile.mla.mla_var6_plus") return Together::in_halves;
  if (kernel == "cute.mla.mla_var6_plus") return Together::in_turn;
  return Together::at_once;
}

std::vector<Figures> figures_of(std::string_view kernel) {
  std::vector<Figures> found;
  const auto collect = [&](std::string_view name) {
    for (const Figures& one : kFigures)
      if (one.kernel == name) found.push_back(one);
  };
  collect(kernel);
  if (found.empty()) collect(kernel.substr(0, kernel.rfind("_v")));
  if (found.empty()) fail("there are no figures of a kernel '{}': it cannot be set against others", kernel);
  return found;
}

double padded(double rows, int tile) { return std::ceil(rows / tile) * tile; }

// Tokens that a query sees on average, and the half block of the diagonal that is computed and masked.
double tokens_seen(const AttentionShape& shape, bool causal) {
  const double s = shape.s, t = shape.t;
  if (!causal) return t;
  return std::min(t, (t >= s ? t - (s - 1) / 2 : t * (t + 1) / (2 * s)) + 64);
}

// The times of one kernel's work before they are set against each other.
struct Times {
  double tensor = 0;   // seconds
  double memory = 0;   // at the kernel's own rate
  double traffic = 0;  // at the full rate
  double launches = 0;

  Times& operator+=(const Times& other) {
    tensor += other.tensor;
    memory += other.memory;
    traffic += other.traffic;
    launches += other.launches;
    return *this;
  }
};

TimeEstimate estimate(const Times& times, const Ceilings& ceilings, double overlap = 1) {
  const double shared = times.tensor + ceilings.power_share * times.traffic;
  const double busy = std::max(times.memory, shared) / overlap;
  TimeEstimate result{busy + times.launches, Limit::power};
  if (times.launches > busy)
    result.limit = Limit::launches;
  else if (times.memory >= shared)
    result.limit = Limit::memory;
  else if (times.tensor >= 0.9 * shared)
    result.limit = Limit::tensor;
  return result;
}

TimeEstimate in_turn(const TimeEstimate& first, const TimeEstimate& second) {
  return {first.seconds + second.seconds, first.seconds >= second.seconds ? first.limit : second.limit};
}

Times times_of(const Figures& figures, const Cost& cost, double tiles, const Ceilings& ceilings) {
  const double waves = tiles / ceilings.processors;
  const double rate = ceilings.load == Load::burst ? figures.burst : figures.sustained;
  const bool whole = figures.readers > 0;
  Times times;
  times.tensor = cost.flops / (ceilings.flops * rate) * (whole ? std::ceil(waves) / waves : 1);
  times.traffic = cost.bytes / ceilings.bytes;
  times.memory = times.traffic / figures.memory * std::max(1.0, figures.readers / waves);
  times.launches = ceilings.launch * (waves >= 0.9 ? figures.full : waves >= 0.45 ? figures.half : figures.few);
  return times;
}

// Attention over the latents: the rows of a request are all its heads' queries.
Times latent_times(const Figures& figures, const AttentionShape& shape, bool causal, const Ceilings& ceilings) {
  const double rows = padded(double(shape.h) * shape.s, figures.rows);
  const Cost cost = {2 * shape.b * rows * tokens_seen(shape, causal) * (2.0 * shape.k + shape.p),
                     flash_mla_cost(shape).bytes};
  const double tiles = shape.b * rows / figures.rows;
  if (figures.kernel != "cutile.mla.flash_mla_split_kv") return times_of(figures, cost, tiles, ceilings);
  const double splits = std::max(1.0, std::floor(ceilings.processors / tiles));  // as many as still make one wave
  Times times = times_of(figures, cost, tiles * splits, ceilings);
  times.launches += ceilings.launch * splits * kMergeOfSplit;
  return times;
}

// Attention over decompressed tokens: the rows of a head are the queries of all requests that share its `stores` keys.
Times decompressed_times(const Figures& figures, const AttentionShape& shape, bool causal, int stores,
                         const Ceilings& ceilings) {
  const double w = shape.bytes_per_element, heads = double(stores) * shape.h, width = 2.0 * shape.d + shape.p;
  const double rows = padded(std::ceil(double(shape.b) * shape.s / stores), figures.rows);
  const Cost cost = {2 * heads * rows * tokens_seen(shape, causal) * width,
                     w * (double(shape.b) * shape.h * shape.s * width + 2 * heads * shape.t * shape.d +
                          double(stores) * shape.t * shape.p)};
  return times_of(figures, cost, heads * rows / figures.rows, ceilings);
}

// The best of several kernels' tiles; of those that memory bounds alike the one that leaves most to others.
template <class TimesOf>
Times best_times(std::initializer_list<std::string_view> kernels, const Ceilings& ceilings, TimesOf&& times_of) {
  Times best;
  std::pair<double, double> least = {INFINITY, INFINITY};
  for (std::string_view kernel : kernels)
    for (const Figures& figures : figures_of(kernel)) {
      const Times times = times_of(figures);
      const std::pair seconds = {estimate(times, ceilings).seconds, times.tensor};
      if (seconds < least) least = seconds, best = times;
    }
  return best;
}

std::string_view language_of(std::string_view kernel) { return kernel.substr(0, kernel.find('.')); }
bool has(std::string_view kernel, std::string_view part) { return kernel.find(part) != std::string_view::npos; }

Times attention_times(std::string_view kernel, const AttentionShape& shape, bool causal, const Ceilings& ceilings) {
  flash_mla_cost(shape);  // refuses what is no shape
  return best_times({kernel}, ceilings, [&](const Figures& figures) {
    return has(kernel, "flash_attention") ? decompressed_times(figures, shape, causal, shape.b, ceilings)
                                          : latent_times(figures, shape, causal, ceilings);
  });
}

// What follows the parts of a hybrid: latent parts go through the projection, decompressed ones are added.
TimeEstimate combine_time(const AttentionShape& shape, bool latent, bool decompressed, bool cute,
                          const Ceilings& ceilings) {
  Cost cost = latent ? output_decompression_cost(shape) : Cost{};
  const double outputs = shape.bytes_per_element * shape.b * shape.h * shape.s * shape.d;
  if (decompressed) cost.bytes += latent ? outputs : 2 * outputs;
  const double traffic = cost.bytes / ceilings.bytes;
  return estimate(
      {cost.flops / (ceilings.flops * kDecompressionTensor), traffic / decompression_reads(cute), traffic, 0},
      ceilings);
}

}  // namespace

Ceilings ceilings_of(const DeviceSpec& device, DType dtype, Load load) {
  const bool tensor = dtype == DType::bfloat16 || dtype == DType::float16;
  const double measured =
      tensor ? device.measured_or(load == Load::burst ? "matmul_burst_tflops" : "matmul_sustained_tflops", 0) : 0;
  const double tflops = measured > 0 ? measured : device.peak_tflops(dtype);
  const double gbps = device.measured_or("read_GBps", device.peak_gbps);
  predict({.flops = 1, .bytes = 1}, device, dtype);  // says what is missing
  return {.flops = tflops * 1e12,
          .bytes = gbps * 1e9,
          .power_share = device.measured_or("power_share", 0),
          .launch = device.measured_or("launch_us", 0) * 1e-6,
          .processors = std::max(device.sm_count, 1),
          .load = load};
}

double power_share_of(double both, double tensor, double reads) {
  return std::clamp((both - tensor) / reads, 0.01, 1.0);
}

std::string_view limit_name(Limit limit) {
  constexpr std::string_view kNames[] = {"tensor", "memory", "power", "launches"};
  return kNames[int(limit)];
}

TimeEstimate attention_time(std::string_view kernel, const AttentionShape& shape, bool causal,
                            const Ceilings& ceilings) {
  return estimate(attention_times(kernel, shape, causal, ceilings), ceilings);
}

TimeEstimate output_decompression_time(const AttentionShape& shape, const Ceilings& ceilings) {
  return combine_time(shape, true, false, true, ceilings);
}

TimeEstimate hybrid_time(std::string_view kernel, const AttentionShape& shape, int n, int prefixes,
                         const Ceilings& ceilings) {
  mla_var6_plus_cost(shape, n);  // refuses what is no shape
  const bool cute = language_of(kernel) == "cute";
  const Together how = together(kernel);
  AttentionShape latent = shape, decompressed = shape;
  latent.t = shape.t - n;
  decompressed.t = n;
  const auto latent_part = [&] {
    const auto times = [&](const Figures& figures) { return latent_times(figures, latent, false, ceilings); };
    return cute ? best_times({"cute.mla.flash_mla", "cute.mla.flash_mla_v1"}, ceilings, times)
                : best_times({"cutile.mla.flash_mla"}, ceilings, times);
  };
  const auto decompressed_part = [&] {
    const auto times = [&](const Figures& figures) {
      return decompressed_times(figures, decompressed, false, prefixes > 0 ? prefixes : shape.b, ceilings);
    };
    const bool beside_the_other = how == Together::at_once && n < shape.t;
    if (!cute)
      return best_times({beside_the_other && prefixes == 0 ? "cutile.decompressed_part" : "cutile.mla.flash_attention"},
                        ceilings, times);
    if (beside_the_other) return best_times({"cute.decompressed_part"}, ceilings, times);
    if (prefixes > 0) return best_times({"cute.prefix_part"}, ceilings, times);
    return best_times({"cute.mla.flash_attention", "cute.mla.flash_attention_v1"}, ceilings, times);
  };
  if (n == 0) return in_turn(estimate(latent_part(), ceilings), combine_time(shape, true, false, cute, ceilings));
  if (n == shape.t)
    return in_turn(estimate(decompressed_part(), ceilings), combine_time(shape, false, true, cute, ceilings));
  TimeEstimate combine = combine_time(shape, true, true, cute, ceilings);
  combine.seconds += ceilings.launch;
  const Times one = latent_part(), other = decompressed_part();
  if (how == Together::at_once) {
    Times both = one;
    both += other;
    both.launches = std::max(one.launches, other.launches);
    return in_turn(estimate(both, ceilings, overlap_of(kernel)), combine);
  }
  const TimeEstimate first = estimate(one, ceilings), second = estimate(other, ceilings);
  if (how == Together::in_turn) return in_turn(in_turn(first, second), combine);
  // Half of the processors each: the longer part decides, at half its speed.
  const TimeEstimate& longer = first.seconds >= second.seconds ? first : second;
  return in_turn({2 * longer.seconds / overlap_of(kernel), longer.limit}, combine);
}

namespace {

// Of n against the better end, under the load where it looks worse.
double ratio(std::string_view kernel, const AttentionShape& shape, int n, int prefixes, const Ceilings (&loads)[2]) {
  double worst = 0;
  for (const Ceilings& ceilings : loads) {
    const auto seconds = [&](int tokens) { return hybrid_time(kernel, shape, tokens, prefixes, ceilings).seconds; };
    worst = std::max(worst, seconds(n) / std::min(seconds(0), seconds(shape.t)));
  }
  return worst;
}

}  // namespace

int best_interior_n(std::string_view kernel, const AttentionShape& shape, int prefixes, const DeviceSpec& device,
                    DType dtype) {
  const Ceilings loads[] = {ceilings_of(device, dtype, Load::burst), ceilings_of(device, dtype, Load::sustained)};
  const int step = 64 * std::max(1, shape.t / (64 * 128));  // at most some 256 of them
  int best = 0;
  double least = INFINITY;
  for (int n = step; n < shape.t; n += step) {
    const double of_n = ratio(kernel, shape, n, prefixes, loads);
    if (of_n < least) least = of_n, best = n;
  }
  return best;
}

int choose_n(std::string_view kernel, const AttentionShape& shape, const DeviceSpec& device, DType dtype) {
  const Ceilings loads[] = {ceilings_of(device, dtype, Load::burst), ceilings_of(device, dtype, Load::sustained)};
  const int end = ratio(kernel, shape, 0, 0, loads) <= ratio(kernel, shape, shape.t, 0, loads) ? 0 : shape.t;
  const int between = best_interior_n(kernel, shape, 0, device, dtype);
  return between > 0 && ratio(kernel, shape, between, 0, loads) * kMargin < 1 ? between : end;
}

}  // namespace hypermla
