// What --check must catch: an attention kernel in plain C++, tile by tile as on a GPU, and the faults that such kernels
// have had. Every one is in the arithmetic of the real kernels, too, and none may pass.
#include <gtest/gtest.h>

#include <cmath>

#include "cutile/mla/flash_mla/flash_mla/flash_mla.h"
#include "hypermla/plan/check.h"
#include "mla/latent/latent_plan.h"
#include "support.h"

namespace hypermla::mutants_test {
namespace {

enum class Fault {
  none,
  truncated_sums,  // no fault: a tensor core adds 16 products at a time and cuts off what 24 bits do not hold
  last_tile_without_mask,
  scale_off_by_a_thousandth,
  merge_in_base_2,
  causal_edge_one_late,
  causal_edge_one_early,
  no_causal_mask,
  accumulator_not_rescaled,
  sum_not_rescaled,
  first_maximum_kept_in_lse,
  first_token_of_a_tile_lost,
  parts_overlap,
  rope_of_the_next_token,
  lse_without_logarithm,
};

float cut_to_24_bits(double value) {
  const float nearest = float(value);
  return std::fabs(nearest) > std::fabs(value) ? std::nextafter(nearest, 0.0f) : nearest;
}

// Two parts of the tokens, tiles of 64, weights and partial outputs in 16 bits, sums in fp32.
class FaultyAttention : public Executable {
 public:
  FaultyAttention(const LatentProblem& at, const Tensors& tensors, Fault fault)
      : Executable("faulty"), at_(at), tensors_(tensors), fault_(fault) {}
  void prepare(Compiler&, Device&) override {}
  std::vector<TiledKernel*> kernels() override { return {}; }
  Cost cost() const override { return {}; }
  Prediction predict(const DeviceSpec&, DType) const override { return {}; }

  void run(StreamHandle) override {
    for (int request = 0; request < at_.b; ++request) {
      z_ = floats("z", std::int64_t{request} * at_.t * at_.k, at_.t * at_.k);
      kpe_ = floats("kpe", std::int64_t{request} * at_.t * at_.p, at_.t * at_.p);
      for (int row = request * at_.h * at_.s; row < (request + 1) * at_.h * at_.s; ++row) attend(row);
    }
  }

 private:
  struct Part {
    std::vector<float> o;
    float lse;
  };

  std::vector<float> floats(const char* name, std::int64_t first, std::int64_t count) const {
    const auto* bits = static_cast<const std::uint16_t*>(tensors_.at(name).data) + first;
    std::vector<float> values(count);
    for (std::int64_t i = 0; i < count; ++i) values[i] = from_half_bits(bits[i], at_.dtype);
    return values;
  }
  float rounded(float value) const { return from_half_bits(to_half_bits(value, at_.dtype), at_.dtype); }
  float add(float sum, double products) const {
    return fault_ == Fault::truncated_sums ? cut_to_24_bits(sum + products) : float(sum + products);
  }
  float score(const std::vector<float>& qc, const std::vector<float>& qpe, int token) const {
    if (token >= at_.t) return 0;  // zeros behind the end
    const int rope = fault_ == Fault::rope_of_the_next_token && token == at_.t - 2 ? token + 1 : token;
    float sum = 0;
    for (int c = 0; c < at_.k + at_.p; c += 16) {
      double products = 0;
      for (int i = c; i < c + 16; ++i)
        products +=
            i < at_.k ? double(qc[i]) * z_[token * at_.k + i] : double(qpe[i - at_.k]) * kpe_[rope * at_.p + i - at_.k];
      sum = add(sum, products);
    }
    return sum;
  }

  Part attend_part(int row, int begin, int end) const {
    constexpr int kTile = 64;
    const std::vector<float> qc = floats("qc", std::int64_t{row} * at_.k, at_.k),
                             qpe = floats("qpe", std::int64_t{row} * at_.p, at_.p);
    const float scale = score_scale(at_) * (fault_ == Fault::scale_off_by_a_thousandth ? 1.001f : 1.0f);
    const int edge = (fault_ == Fault::causal_edge_one_late) - (fault_ == Fault::causal_edge_one_early);
    int seen = at_.causal && fault_ != Fault::no_causal_mask ? at_.t - at_.s + row % at_.s + 1 + edge : at_.t;
    if (fault_ == Fault::last_tile_without_mask && !at_.causal) seen = (at_.t + kTile - 1) / kTile * kTile;
    float most = -HUGE_VALF, first_most = 0, sum = 0;
    std::vector<float> o(at_.k, 0.0f);
    for (int tile = begin; tile < std::min(end, seen); tile += kTile) {
      const int last = std::min({tile + kTile, end, seen});
      std::vector<float> scores;
      for (int token = tile; token < last; ++token) scores.push_back(score(qc, qpe, token) * scale * kLog2e);
      const float new_most = std::max(most, *std::max_element(scores.begin(), scores.end()));
      const float rescale = std::exp2(most - new_most);
      if (tile == begin) first_most = new_most;
      if (fault_ != Fault::sum_not_rescaled) sum *= rescale;
      if (fault_ != Fault::accumulator_not_rescaled || tile == begin)
        for (float& one : o) one *= rescale;
      for (int token = tile; token < last; ++token) {
        if (fault_ == Fault::first_token_of_a_tile_lost && token == begin + kTile) continue;
        const float weight = std::exp2(scores[token - tile] - new_most), value = rounded(weight);
        sum += weight;
        for (int c = 0; token < at_.t && c < at_.k; ++c) o[c] = add(o[c], double(value) * z_[token * at_.k + c]);
      }
      most = new_most;
    }
    for (float& one : o) one = sum > 0 ? rounded(one / sum) : 0;
    if (fault_ == Fault::first_maximum_kept_in_lse) most = first_most;
    const float logarithm = fault_ == Fault::lse_without_logarithm ? 0 : std::log2(sum);
    return {std::move(o), (most + logarithm) / kLog2e};
  }

  void attend(int row) {
    const int half = (at_.t / 2 + 63) / 64 * 64, all = (at_.t + 63) / 64 * 64;
    const Part parts[] = {attend_part(row, 0, half), attend_part(row, half - (fault_ == Fault::parts_overlap), all)};
    const float most = std::max(parts[0].lse, parts[1].lse);
    float weights[2], sum = 0;
    for (int i = 0; i < 2; ++i)
      sum += weights[i] =
          fault_ == Fault::merge_in_base_2 ? std::exp2(parts[i].lse - most) : std::exp(parts[i].lse - most);
    auto* o = static_cast<std::uint16_t*>(tensors_.at("o").data) + std::int64_t{row} * at_.k;
    for (int c = 0; c < at_.k; ++c)
      o[c] = to_half_bits((weights[0] * parts[0].o[c] + weights[1] * parts[1].o[c]) / sum, at_.dtype);
    static_cast<float*>(tensors_.at("lse").data)[row] = most + std::log(sum);
  }

  LatentProblem at_;
  Tensors tensors_;
  Fault fault_;
  std::vector<float> z_, kpe_;
};

class FaultyPlan : public AttentionPlan<LatentProblem, FlashMlaTiling> {
 public:
  explicit FaultyPlan(Fault fault) : AttentionPlan(kLatentServing), fault_(fault) {}
  void use_default_tiling() override {}
  void validate() const override { validate_latent(problem); }
  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    return std::make_unique<FaultyAttention>(problem, tensors, fault_);
  }

 private:
  Fault fault_;
};

// The inputs on which it fails.
std::vector<std::string> failures(Fault fault, bool causal, DType dtype = DType::bfloat16, int t = 1024) {
  const auto device = std::make_shared<testing_support::FakeDevice>();
  KernelEntry entry;
  entry.make = [fault] { return std::make_unique<FaultyPlan>(fault); };
  FaultyPlan plan(fault);
  plan.problem = {.b = 1, .s = 3, .t = t, .h = 2, .dtype = dtype, .causal = causal};
  AllocatedTensors tensors(plan, device, 1);
  const std::unique_ptr<Executable> executable = plan.plan(tensors.tensors());
  Compiler compiler{CompilerConfig{}};
  std::vector<std::string> failed;
  const std::vector<NamedCheck> all = check_inputs(entry, plan, *executable, tensors, device, compiler, 1);
  EXPECT_EQ(all.size(), t % 2 ? 2u : 3u);
  for (const auto& [inputs, result] : all) {
    if (!result.passed) failed.push_back(inputs);
    // Half of what is allowed is left to a correct kernel.
    for (const OutputError& error : result.outputs) {
      if (fault > Fault::truncated_sums) break;
      EXPECT_LT(error.worst, 0.5 * tolerance(error.output == "o" ? dtype : DType::float32, dtype).elementwise)
          << inputs << " " << error.output;
    }
  }
  return failed;
}

TEST(Mutants, AnHonestKernelPasses) {
  for (const Fault honest : {Fault::none, Fault::truncated_sums})
    for (const bool causal : {false, true}) {
      EXPECT_EQ(failures(honest, causal), std::vector<std::string>());
      EXPECT_EQ(failures(honest, causal, DType::float16), std::vector<std::string>());
    }
}

TEST(Mutants, EveryFaultIsCaught) {
  for (int fault = int(Fault::last_tile_without_mask); fault <= int(Fault::lse_without_logarithm); ++fault) {
    const bool causal = fault >= int(Fault::causal_edge_one_late) && fault <= int(Fault::no_causal_mask);
    EXPECT_NE(failures(Fault(fault), causal), std::vector<std::string>()) << "fault " << fault;
  }
}

// One token too many shows in an odd t: the user's or the one beside it.
TEST(Mutants, AnOddNumberOfTokensShowsATileWithoutMask) {
  EXPECT_EQ(failures(Fault::last_tile_without_mask, false), std::vector<std::string>{"t=333"});
  EXPECT_EQ(failures(Fault::last_tile_without_mask, false, DType::bfloat16, 1023),
            std::vector<std::string>{"random inputs"});
}

}  // namespace
}  // namespace hypermla::mutants_test
