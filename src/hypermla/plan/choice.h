// Which kernel, and how many decompressed tokens, for a problem on a device: every registered kernel of every path
// through Multi-head Latent Attention, ranked by the time that its plan predicts (KernelPlan::time).
//
//   latent         attention in the latent space, then the output decompression
//   decompressed   attention over keys and values of each request
//   hybrid         n of each request's tokens decompressed, the others latent
//   shared prefix  the first tokens decompressed once for the requests that share them, the others latent
#pragma once

#include <string>
#include <vector>

#include "hypermla/plan/configure.h"

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
  int page = 0;
  int fp8 = 0;
  bool fp8_queries = false;

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
    field("page", self.page, "tokens of a cache page; 1: lists of chosen tokens; 0: a dense cache");
    field("fp8", self.fp8, "bytes of a token in FP8: 656 or 576, in pages; 0: elements of dtype");
    field("fp8_queries", self.fp8_queries, "queries in e4m3, too: with --fp8=576");
  }
  // Throws Error for values without a meaning. Afterwards t counts all tokens of a request.
  void settle();
};

struct RankedKernel {
  Path path = Path::none;
  KernelEntry entry;  // of the attention; the plan of plans_of() that follows it makes the output
  int n = 0;          // decompressed tokens of a request
  TimeEstimate burst, sustained;
};

// Fastest first, sustained; equal ones by version, the newest first. Leaves out what does not run on the target or
// refuses the problem, and with a `language` all kernels in others. Throws Error when nothing is left.
std::vector<RankedKernel> rank_kernels(const Registry& registry, ChoiceProblem problem, const PlannedDevice& device,
                                       const std::string& language = "");

// The one to take: the fastest that is no draft, or the fastest where all are.
const RankedKernel& choice(const std::vector<RankedKernel>& ranking);

// The plans to run for one of them, in order, with their default tilings: attention and, where another follows it, that
// one, whose input o_latent is the output o of the first.
std::vector<std::unique_ptr<KernelPlan>> plans_of(const Registry& registry, const RankedKernel& ranked,
                                                  ChoiceProblem problem, const PlannedDevice& device);

// For a plan with the fields t and n, the decompressed tokens of a request. The best of n = step, 2 step, ... below t
// under both loads: of the least ratio to the better of n = 0 and n = t; 0 when t does not exceed the step.
int best_interior_n(KernelPlan& plan, const DeviceSpec& device);

// The n to take: 0 or t, unless the best n between them gains more than the error of the model (5 %) over both, in
// bursts and sustained.
int choose_n(KernelPlan& plan, const DeviceSpec& device);

}  // namespace hypermla
