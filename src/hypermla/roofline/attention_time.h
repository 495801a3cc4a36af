// How long attention really takes on a device, for the choice of a path, a kernel and the number of decompressed
// tokens. Not the least possible time (roofline.h): it counts what kernels reach of the measured ceilings.
//
//   time = max(memory, tensor + a memory') + launches
//
// `tensor` and `memory` are the kernel's own times of arithmetic, rows padded to whole tiles, and of traffic; memory'
// is the traffic at the full read rate, and a the power_share of devices.json: under the power cap tensor work and
// reads share one budget, x + a y <= 1. docs/choice.md compares predictions with measurements.
#pragma once

#include <string_view>

#include "hypermla/roofline/attention_cost.h"

namespace hypermla {

// After idle, or for seconds under the power cap.
enum class Load { burst, sustained };

// The ceilings of a device: the measured figures of devices.json, or where there are none the specified ones.
struct Ceilings {
  double flops = 0;        // FLOP/s
  double bytes = 0;        // bytes/s
  double power_share = 0;  // 0 if not measured: arithmetic and traffic then overlap perfectly
  double launch = 0;       // seconds of one more kernel
  int processors = 1;
  Load load = Load::sustained;
};
// Throws Error where neither figure is known.
Ceilings ceilings_of(const DeviceSpec& device, DType dtype, Load load);

// a in tensor + a reads = both, which is how a device under its power cap divides its time: from the seconds of one
// kernel that does both, of its tensor work alone, and of its reads at the full rate. Clamped to 0.01 to 1, since
// measurements are noisy.
double power_share_of(double both, double tensor, double reads);

enum class Limit { tensor, memory, power, launches };
std::string_view limit_name(Limit limit);

struct TimeEstimate {
  double seconds = 0;
  Limit limit = Limit::memory;  // what takes most of the time; power: both, under the power cap
};

// Kernels by full name, "cute.mla.flash_mla_v1". A version without figures counts as the base version of its design.
// All throw Error for a name that no figures fit, and for a shape with an extent below 1.

// Of flash_mla, flash_mla_split_kv or flash_attention. `causal`: query i sees the first t - s + i + 1 tokens.
TimeEstimate attention_time(std::string_view kernel, const AttentionShape& shape, bool causal,
                            const Ceilings& ceilings);

// Of the output decompression, which the latent path needs after it.
TimeEstimate output_decompression_time(const AttentionShape& shape, const Ceilings& ceilings);

// Of mla_var6_plus, its combine included, with `n` of the t tokens decompressed: each request's own (prefixes = 0), or
// stored once for each of `prefixes` groups of requests. Throws Error unless 0 <= n <= t.
TimeEstimate hybrid_time(std::string_view kernel, const AttentionShape& shape, int n, int prefixes,
                         const Ceilings& ceilings);

// The best of n = step, 2 step, ... below t under both loads: of the least ratio to the better of n = 0 and n = t; 0
// when t does not exceed the step.
int best_interior_n(std::string_view kernel, const AttentionShape& shape, int prefixes, const DeviceSpec& device,
                    DType dtype);

// The n to take for mla_var6_plus: 0 or t, unless the best n between them gains more than the error of the model (5 %)
// over both, in bursts and sustained. For requests with decompressed tokens of their own.
int choose_n(std::string_view kernel, const AttentionShape& shape, const DeviceSpec& device, DType dtype);

}  // namespace hypermla
