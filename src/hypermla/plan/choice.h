// Which kernel, and how many decompressed tokens, for a problem on a device: every registered kernel of every path
// through Multi-head Latent Attention, ranked by the model of roofline/attention_time.h.
//
//   latent         flash_mla or flash_mla_split_kv, then the output decompression
//   decompressed   flash_attention over keys and values of each request
//   hybrid         mla_var6_plus with n of each request's tokens decompressed
//   shared prefix  mla_var6_plus with the first tokens decompressed once for the requests that share them
#pragma once

#include <string>
#include <vector>

#include "hypermla/plan/configure.h"
#include "hypermla/roofline/attention_time.h"

namespace hypermla {

struct ChoiceProblem {
  int b = 32;
  int s = 1;
  int t = 4096;
  int h = 128;
  int d = 128;
  int p = 64;
  int k = 512;
  DType dtype = DType::bfloat16;
  bool causal = false;
  int prefix = 0;
  int prefixes = 1;
  int own = 0;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("b", self.b, "batch size");
    field("s", self.s, "queries per head");
    field("t", self.t, "context length in tokens");
    field("h", self.h, "query heads");
    field("d", self.d, "head dimension");
    field("p", self.p, "RoPE dimension");
    field("k", self.k, "latent dimension");
    field("dtype", self.dtype, "element type");
    field("causal", self.causal, "query i sees the tokens up to t - s + i only");
    field("prefix", self.prefix, "first tokens of a request that it shares with others");
    field("prefixes", self.prefixes, "how many different prefixes the batch has");
    field("private", self.own, "tokens of a request behind its prefix; 0: t - prefix");
  }
  // Throws Error for values without a meaning. Afterwards t counts all tokens of a request.
  void settle();
};

struct RankedKernel {
  std::string path;
  KernelEntry entry;  // of the attention; the latent path runs output_decompression after it
  int n = 0;          // decompressed tokens of a request
  TimeEstimate burst, sustained;
};

// Fastest first, sustained; equal ones by version, the newest first. Leaves out what does not run on the target or
// refuses the problem. Throws Error when nothing is left.
std::vector<RankedKernel> rank_kernels(const Registry& registry, ChoiceProblem problem, const PlannedDevice& device);

// The one to take: the fastest that is no draft, or the fastest where all are.
const RankedKernel& choice(const std::vector<RankedKernel>& ranking);

// The plans to run for one of them, in order, with their default tilings: attention and, on the latent path, the output
// decompression, whose input o_latent is the output o of the first.
std::vector<std::unique_ptr<KernelPlan>> plans_of(const Registry& registry, const RankedKernel& ranked,
                                                  ChoiceProblem problem, const PlannedDevice& device);

}  // namespace hypermla
