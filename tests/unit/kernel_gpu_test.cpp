// What only a Hopper GPU can show of the public Kernel: lengths that lie in its memory are cut, and check() says so.
#include <gtest/gtest.h>

#include "hypermla/device/device.h"
#include "hypermla/hypermla.h"
#include "support.h"

namespace hypermla::kernel_gpu_test {
namespace {
using testing_support::contains;
using testing_support::error_of;

class KernelOnHopper : public testing_support::OnHopper {
 protected:
  // A kernel with memory behind all of its tensors, of the same bytes in inputs and others in what it writes.
  Kernel bound(const std::string& name, const std::map<std::string, std::string>& problem, const std::string& version) {
    Kernel kernel(name, problem, DeviceHandle("cuda"), version, "cute");
    for (const TensorInfo& info : kernel.tensors()) {
      Buffer& memory = memory_[info.name] = Buffer(device_, info.bytes);
      device_->fill(memory.data(),
                    info.dtype == DType::int32 && info.is_input ? 0
                    : info.is_input                             ? 0x3c
                                                                : 0xff,
                    info.bytes);
      kernel.bind(info.name, memory.data());
    }
    return kernel;
  }
  // The log-sum-exp for these lengths.
  std::vector<float> run(Kernel& kernel, std::vector<int> lengths) {
    copy(memory_["lengths"], lengths);
    kernel.run();
    device_->synchronize();
    return back<float>(memory_["lse"]);
  }

  std::map<std::string, Buffer> memory_;
};

TEST_F(KernelOnHopper, LengthsBeyondWhatIsBoundAreCutAndSaid) {
  for (const char* version : {"v0", "v1"}) {
    Kernel kernel =
        bound("flash_mla", {{"b", "3"}, {"s", "1"}, {"t", "200"}, {"h", "16"}, {"ragged", "true"}}, version);
    EXPECT_EQ(error_of([&] { kernel.check(); }), "") << "before a run";
    const std::vector<float> whole = run(kernel, {200, 200, 7});
    EXPECT_EQ(error_of([&] { kernel.check(); }), "");
    for (const int wrong : {201, 1 << 30}) {
      EXPECT_EQ(run(kernel, {200, wrong, 7}), whole) << wrong;
      EXPECT_TRUE(contains(error_of([&] { kernel.check(); }), "`lengths` below 0 or beyond 200")) << wrong;
    }
    const std::vector<float> empty = run(kernel, {200, 0, 7});
    EXPECT_EQ(error_of([&] { kernel.check(); }), "");
    EXPECT_EQ(run(kernel, {200, -1, 7}), empty);
    EXPECT_TRUE(contains(error_of([&] { kernel.check(); }), "`lengths` below 0"));
  }
}

TEST_F(KernelOnHopper, AHybridSaysWhatItsLatentStageCut) {
  Kernel kernel = bound("mla_var6_plus",
                        {{"b", "3"}, {"s", "1"}, {"t", "300"}, {"n", "100"}, {"h", "16"}, {"ragged", "true"}}, "v0");
  run(kernel, {200, 0, 7});
  EXPECT_EQ(error_of([&] { kernel.check(); }), "");
  run(kernel, {200, 201, 7});
  EXPECT_TRUE(contains(error_of([&] { kernel.check(); }), "`lengths` below 0 or beyond 200"));
}

}  // namespace
}  // namespace hypermla::kernel_gpu_test
