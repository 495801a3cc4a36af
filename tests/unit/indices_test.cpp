// Lengths and indices that a caller binds, on the CPU: a kernel would follow them out of its tensors.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "hypermla/hypermla.h"
#include "hypermla/plan/configure.h"
#include "hypermla/plan/registry.h"
#include "hypermla/plan/status.h"
#include "support.h"

namespace hypermla::indices_test {
namespace {
using testing_support::contains;
using testing_support::error_of;

// A kernel with memory of zeros behind all of its tensors.
struct Bound {
  Bound(const std::string& name, const std::map<std::string, std::string>& problem)
      : kernel(name, problem, DeviceHandle("cpu")) {
    for (const TensorInfo& info : kernel.tensors()) {
      void* data = std::aligned_alloc(256, (info.bytes + 255) / 256 * 256);
      memory[info.name].reset(data);
      std::memset(data, 0, info.bytes);
      kernel.bind(info.name, data);
    }
  }
  int& at(const std::string& name, int i) { return static_cast<int*>(memory.at(name).get())[i]; }
  // What run(), tune() and profile() say of a value.
  std::string refused(const std::string& name, int i, int value) {
    const int before = std::exchange(at(name, i), value);
    const std::string said = error_of([&] { kernel.run(); });
    EXPECT_EQ(error_of([&] { kernel.tune(); }), said);
    EXPECT_EQ(error_of([&] { kernel.profile(); }), said);
    at(name, i) = before;
    return said;
  }

  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::map<std::string, std::unique_ptr<void, Free>> memory;
  Kernel kernel;
};

TEST(Indices, ThatLeaveTheTensorsAreRefused) {
  Bound at("mla_var6_plus",
           {{"b", "3"}, {"s", "1"}, {"t", "40"}, {"n", "16"}, {"h", "2"}, {"ragged", "true"}, {"prefixes", "2"}});
  EXPECT_EQ(at.refused("lengths", 2, 25), "lengths[2] is 25; it must be from 0 to 24");
  EXPECT_EQ(at.refused("lengths", 0, -1), "lengths[0] is -1; it must be from 0 to 24");
  EXPECT_EQ(at.refused("lengths", 1, 1 << 30), "lengths[1] is 1073741824; it must be from 0 to 24");
  EXPECT_EQ(at.refused("new_lengths", 1, 17), "new_lengths[1] is 17; it must be from 0 to 16");
  EXPECT_EQ(at.refused("prefix", 1, -1), "prefix[1] is -1; it must be from 0 to 1");
  EXPECT_EQ(at.refused("prefix", 2, 2), "prefix[2] is 2; it must be from 0 to 1");
}

// v3 takes several requests at once, of prefixes that lie apart: between them is one of no request, which holds NaN.
TEST(Indices, APrefixThatNoRequestHasMayHoldAnything) {
  Bound at("mla_var6_plus_v3", {{"b", "4"}, {"s", "1"}, {"t", "40"}, {"n", "16"}, {"h", "2"}, {"prefixes", "3"}});
  for (const int i : {1, 3}) at.at("prefix", i) = 2;
  for (const TensorInfo& info : at.kernel.tensors())
    if (info.name == "k" || info.name == "v" || info.name == "kpe_new")
      std::memset(static_cast<char*>(at.memory.at(info.name).get()) + info.bytes / 3, 0xff, info.bytes / 3);
  at.kernel.run();
  const auto* lse = static_cast<const float*>(at.memory.at("lse").get());
  for (int i = 0; i < 4 * 2; ++i) EXPECT_NEAR(lse[i], std::log(40.0), 1e-5) << i;
}

// On a GPU a planner looks at the lengths of the latent tokens, and leaves what it found in a workspace.
TEST(Indices, APlannerSaysWhatItCut) {
  testing_support::FakeDevice device;
  for (const auto& [name, problem, most] : {std::tuple("cute.mla.flash_mla", Json{{"t", 40}}, 40),
                                            {"cute.mla.mla_var6_plus", {{"t", 40}, {"n", 16}}, 24}}) {
    const std::unique_ptr<KernelPlan> plan = Registry::instance().find(name, "").make();
    Json of = problem;
    of.update({{"b", 2}, {"ragged", true}});
    set_problem(*plan, of);
    Tensors tensors = empty_tensors(*plan);
    int status[2] = {}, found = 0;
    for (auto& [tensor, its] : tensors)
      if (tensor.find("plan_status") != std::string::npos) its.data = status, ++found;
    EXPECT_EQ(found, 1) << name;
    EXPECT_EQ(error_of([&] { check_status(plan->tensors(), tensors, device); }), "");
    status[0] = kWrongTokens;
    EXPECT_EQ(error_of([&] { check_status(plan->tensors(), tensors, device); }),
              fmt::format("the last run had `lengths` below 0 or beyond {}, which were cut to that; mend them, or make "
                          "the kernel for more",
                          most));
  }
}

// All int32 inputs of all forms have a limit, but block tables, which hold entries that are never followed.
TEST(Indices, EveryIntegerHasItsLimit) {
  for (const auto& [kernel, problem] : std::map<std::string, Json>{
           {"cute.mla.flash_mla", {{"ragged", true}, {"causal", true}, {"after", 7}, {"page", 64}, {"t", 300}}},
           {"cute.mla.flash_attention",
            {{"ragged", true}, {"causal", true}, {"after", 7}, {"prefixes", 3}, {"t", 300}}},
           {"cute.mla.mla_var6_plus", {{"ragged", true}, {"prefixes", 3}, {"t", 300}, {"n", 200}}}}) {
    const std::unique_ptr<KernelPlan> plan = Registry::instance().find(kernel).make();
    set_problem(*plan, problem);
    std::map<std::string, int> limits;
    for (const TensorSpec& spec : plan->tensors())
      if (spec.dtype == DType::int32 && spec.role == Role::input) limits[spec.name] = spec.most;
    for (const auto& [name, most] : std::map<std::string, int>{{"lengths", kernel.ends_with("plus") ? 100 : 300},
                                                               {"after_lengths", 7},
                                                               {"new_lengths", 200},
                                                               {"prefix", 2},
                                                               {"block_table", -1}})
      if (limits.count(name)) {
        EXPECT_EQ(limits.at(name), most) << kernel << " " << name;
        limits.erase(name);
      }
    EXPECT_TRUE(limits.empty()) << limits.begin()->first;
    EXPECT_EQ(error_of([&] { require_indices(plan->tensors(), empty_tensors(*plan)); }), "");
  }
}

}  // namespace
}  // namespace hypermla::indices_test
