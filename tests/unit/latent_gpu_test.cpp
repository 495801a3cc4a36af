// What only a Hopper GPU can show beyond `hypermla verify`: bits of the latent kernel that do not depend on the batch;
// lengths and prefixes that change between the replays of a recording.
#include <gtest/gtest.h>

#include <cstring>

#include "hypermla/api/environment.h"
#include "hypermla/plan/check.h"
#include "hypermla/plan/configure.h"
#include "hypermla/plan/registry.h"
#include "support.h"

namespace hypermla::latent_gpu_test {
namespace {

class PlanOnHopper : public testing_support::OnHopper {
 protected:
  void SetUp() override {
    OnHopper::SetUp();
    compiler_ = std::make_unique<Compiler>(Environment::detect().compiler_config());
  }
  std::unique_ptr<KernelPlan> plan(const std::string& kernel, const std::string& version, const Json& problem) const {
    std::unique_ptr<KernelPlan> made = Registry::instance().find(kernel, version).make();
    made->target = Target::of(device_->info());
    set_problem(*made, problem);
    made->validate();
    return made;
  }
  // Bytes of one request of a tensor [B, ..].
  std::string bytes_of(const Tensor& tensor, int request) const {
    const std::size_t bytes = tensor.bytes() / tensor.shape[0];
    std::string copy(bytes, '\0');
    device_->copy_to_host(copy.data(), static_cast<char*>(tensor.data) + request * bytes, bytes);
    return copy;
  }

  std::unique_ptr<Compiler> compiler_;
};
class LatentOnHopper : public PlanOnHopper, public testing::WithParamInterface<const char*> {
 protected:
  std::unique_ptr<KernelPlan> plan(const Json& problem) const {
    return PlanOnHopper::plan("cute.mla.flash_mla", GetParam(), problem);
  }
};
INSTANTIATE_TEST_SUITE_P(Versions, LatentOnHopper, testing::Values("v0", "v1"));

TEST_P(LatentOnHopper, FixedCutsGiveTheSameBitsInAnyBatch) {
  const Json one = {{"b", 1}, {"s", 1}, {"t", 9000}, {"h", 16}, {"split", 1024}};
  for (const int mates : {2, 40}) {
    Json many = one;
    many["b"] = mates + 1;
    const auto batch_plan = plan(many), single_plan = plan(one);
    const AllocatedTensors batch(*batch_plan, device_, 1), single(*single_plan, device_, 2);
    const auto whole = batch_plan->plan(batch.tensors()), alone = single_plan->plan(single.tensors());
    whole->prepare(*compiler_, *device_);
    alone->prepare(*compiler_, *device_);
    whole->run(device_->stream());
    device_->synchronize();
    for (const int request : {0, mates}) {
      for (const TensorSpec& spec : single_plan->tensors()) {
        if (spec.role != Role::input) continue;
        const std::string bytes = bytes_of(batch.tensors().at(spec.name), request);
        device_->copy_to_device(single.tensors().at(spec.name).data, bytes.data(), bytes.size());
      }
      alone->run(device_->stream());
      device_->synchronize();
      for (const char* output : {"o", "lse"})
        EXPECT_TRUE(bytes_of(batch.tensors().at(output), request) == bytes_of(single.tensors().at(output), 0))
            << output << " of request " << request << " among " << mates;
    }
  }
}

TEST_P(LatentOnHopper, LengthsMayChangeBetweenReplays) {
  const auto ragged = plan({{"b", 5}, {"s", 2}, {"t", 3000}, {"h", 16}, {"ragged", true}, {"causal", true}});
  AllocatedTensors tensors(*ragged, device_, 3);
  const auto executable = ragged->plan(tensors.tensors());
  executable->prepare(*compiler_, *device_);
  const auto recording = device_->record([&](StreamHandle stream) { executable->run(stream); });
  const Tensor& lengths = tensors.tensors().at("lengths");
  std::vector<std::int32_t> now(5);
  device_->copy_to_host(now.data(), lengths.data, lengths.bytes());
  for (int round = 0; round < 3; ++round) {
    tensors.poison();
    recording->replay(device_->stream());
    device_->synchronize();
    const CheckResult result = check_outputs(*ragged, tensors, *device_, 1);
    EXPECT_TRUE(result.passed) << "round " << round << "\n" << to_text(result);
    for (std::int32_t& length : now) length = length * 2 / 3;  // shorter: what lies behind the first ones is NaN
    device_->copy_to_device(lengths.data, now.data(), lengths.bytes());
  }
}

TEST_F(PlanOnHopper, PrefixesMayChangeBetweenReplays) {
  const auto hybrid = plan(
      "cute.mla.mla_var6_plus", "",
      {{"b", 50}, {"s", 3}, {"t", 700}, {"n", 500}, {"h", 5}, {"prefixes", 4}, {"ragged", true}, {"causal", true}});
  AllocatedTensors tensors(*hybrid, device_, 4);
  const auto executable = hybrid->plan(tensors.tensors());
  executable->prepare(*compiler_, *device_);
  const auto recording = device_->record([&](StreamHandle stream) { executable->run(stream); });
  const Tensor& prefix = tensors.tensors().at("prefix");
  std::vector<std::int32_t> now(50);
  device_->copy_to_host(now.data(), prefix.data, prefix.bytes());
  for (int round = 0; round < 3; ++round) {
    tensors.poison();
    recording->replay(device_->stream());
    device_->synchronize();
    const CheckResult result = check_outputs(*hybrid, tensors, *device_, 1);
    EXPECT_TRUE(result.passed) << "round " << round << "\n" << to_text(result);
    for (std::int32_t& one : now) one = round == 0 ? (one + 1) % 4 : 2;  // others; then one prefix has all requests
    device_->copy_to_device(prefix.data, now.data(), prefix.bytes());
  }
}

// As when Python frees what a function held, the Kernel before the graph: the driver used to crash.
TEST_F(PlanOnHopper, ARecordingIsFreedAfterItsKernels) {
  const auto hybrid = plan("cute.mla.mla_var6_plus", "", {{"b", 32}, {"s", 16}, {"t", 4096}, {"h", 16}, {"n", 64}});
  std::unique_ptr<Recording> recording;
  {
    const AllocatedTensors tensors(*hybrid, device_, 1);
    const auto executable = hybrid->plan(tensors.tensors());
    executable->prepare(*compiler_, *device_);
    recording = device_->record([&](StreamHandle stream) { executable->run(stream); });
    recording->replay(device_->stream());
    device_->synchronize();
  }
  recording.reset();
}

}  // namespace
}  // namespace hypermla::latent_gpu_test
