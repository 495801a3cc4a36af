// A KernelPlan is one version of one kernel: its problem and tiling fields, its tensors, its reference, its cost, and
// how to build the executable. CLI, tuner, checks, tests and benchmarks know kernels only through this interface.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hypermla/base/error.h"
#include "hypermla/base/fields.h"
#include "hypermla/device/architecture.h"
#include "hypermla/plan/decode.h"
#include "hypermla/plan/executable.h"
#include "hypermla/plan/prefill.h"
#include "hypermla/roofline/kernel_time.h"
#include "hypermla/tensor.h"

namespace hypermla {

enum class Role { input, output, workspace };

struct TensorSpec {
  std::string name;
  Role role;
  DType dtype;
  std::vector<std::int64_t> shape;
  // Of an int32 input: its values are from 0 to this. -1: not all of its values are used, as in a block table.
  int most = -1;
};

// By name. The caller owns inputs, outputs and workspace, so run() never allocates.
using Tensors = std::map<std::string, Tensor>;

// Requirements on the inputs of checks and measurements, beyond random numbers. Empty: none.
struct InputRules {
  // The values of int32 inputs: lengths, block tables. Every int32 input needs some.
  std::map<std::string, std::vector<int>> integers;
  // Elements {first, count} that no kernel may use: slots of a cache behind the end of a request. They are filled with
  // NaN.
  std::map<std::string, std::vector<std::pair<std::int64_t, std::int64_t>>> unread;
  // Inputs that hold these bytes again and again in place of random numbers: tokens in FP8 and their factor.
  std::map<std::string, std::vector<char>> repeated;
  // Elements {first, count} of float32 inputs that are -infinity: the log-sum-exp of parts without tokens.
  std::map<std::string, std::vector<std::pair<std::int64_t, std::int64_t>>> minus_infinity;
  // An input [.., rows, columns] whose rows are scaled up along the tokens where a check asks for scores that keep
  // growing, so that a running maximum has to be raised late.
  struct Growing {
    std::string tensor;
    int rows, columns;
  };
  std::optional<Growing> growing;
};

// Reads pieces of an input as float, from device or host memory; any thread may call it.
using InputReader =
    std::function<std::vector<float>(const std::string& tensor, std::int64_t first, std::int64_t count)>;

// The reference computes outputs in independent groups, such as (batch element, head): group g makes the g-th of
// `groups` equal, consecutive pieces of every output.
struct ReferenceShape {
  std::int64_t groups = 0;
  double flops_per_group = 0;
};
// The values of a group by output. A log-sum-exp `lse` comes with `lse_reach`: for each value a bound on the fp32
// numbers that it is made from, before they cancel (plan/check.h says what follows).
using ReferenceOutputs = std::map<std::string, std::vector<double>>;

// How far an output may be from the reference. An element fails when not |got - expected| <= elementwise * (|expected|
// + scale); an output fails when not ||got - expected|| <= norm * ||expected||. Infinities must agree exactly, and NaN
// never passes. The scale is the root mean square of the expected elements of its row, the last axis; of an fp32 output
// it is 1 + reach (ReferenceOutputs). `rounding` is taken off each difference first: half of the smallest step of the
// output's type, which an element may lose however small its row is.
struct Tolerance {
  double elementwise = 0;
  double norm = 0;
  double rounding = 0;
};

// The properties of a device on which tilings depend. The default is an H200.
struct Target {
  std::string arch = "sm_90";
  int processors = 132;  // SMs or cores

  bool is_gpu() const { return is_gpu_arch(arch); }
  bool has_large_blocks() const { return architecture(arch).has_large_blocks(); }
  bool is_small_blackwell() const { return architecture(arch).is_small_blackwell(); }

  static Target of(const DeviceInfo& device) { return {device.arch, device.processors}; }
  // A typical GPU of that architecture, for compilation ahead of time.
  static Target of_arch(const std::string& arch);
};

// The ways through Multi-head Latent Attention, see plan/choice.h.
enum class Path { none, latent, decompressed, hybrid, shared_prefix };
std::string_view path_name(Path path);

class KernelPlan {
 public:
  virtual ~KernelPlan() = default;

  Target target;

  // Fields of this object, to be read and set in place.
  virtual std::vector<FieldRef> problem_fields() = 0;
  virtual std::vector<FieldRef> tiling_fields() = 0;
  // Settles the problem fields that the user leaves to the model (the hybrid's n = -1) for a device. Comes before the
  // tiling.
  virtual void choose(const DeviceSpec& /*device*/) {}
  // The best guess for the problem on the target, used with --no_autotune and as the tuner's starting point. Writes the
  // tiling fields.
  virtual void use_default_tiling() = 0;
  // Throws Error saying what is supported, when the problem or the tiling is not.
  virtual void validate() const = 0;

  // For the choice among kernels. A version without a path counts as the base version of its design; where that has
  // none, too, it is not ranked.
  virtual Path path() const { return Path::none; }
  // What the kernel reaches with each size of its tiles; hybrids that use it ask for them, too.
  virtual std::vector<Figures> figures() const { return {}; }
  // Of the problem with the best tiling; every plan with a path has one. Throws Error where it has none.
  virtual TimeEstimate time(const Ceilings& ceilings) const;
  // The kernel, as Registry::find() takes it, that makes the path's output from this one's. Empty: this one does.
  virtual std::string followed_by() const { return {}; }

  virtual DType dtype() const = 0;
  virtual std::vector<TensorSpec> tensors() const = 0;
  virtual InputRules input_rules(std::uint64_t /*seed*/) const { return {}; }
  virtual ReferenceShape reference_shape() const = 0;
  virtual ReferenceOutputs reference(std::int64_t group, const InputReader& input) const = 0;
  // How far an output of that type may be off: what tolerance() of plan/check.h says of the arithmetic, or more.
  virtual Tolerance allowed(DType output) const;

  // The kernels of an engine's decoding step, where this version can be called so; null: it cannot. The options are
  // settled (plan/decode.h). Throws Error for a capacity that it does not take.
  virtual std::unique_ptr<DecodeKernels> decode(const MlaDecodeOptions& /*options*/) const { return nullptr; }
  // Whether that is what it is for, since it takes no tensors in the type of the queries. Such a version has cases of
  // plan/decode_cases.h alone.
  virtual bool only_decodes() const { return false; }

  // The same for its prefill.
  virtual std::unique_ptr<PrefillKernels> prefill(const MlaPrefillOptions& /*options*/) const { return nullptr; }

  // The executable over these tensors. Data pointers may be null for predictions.
  virtual std::unique_ptr<Executable> plan(const Tensors& tensors) const = 0;
};

// Throws Error for a value of an int32 input, in the memory of the host, that is out of its range: kernels follow them
// unchecked. Tensors without memory are left out.
void require_indices(const std::vector<TensorSpec>& specs, const Tensors& tensors);

// The tensors a plan asks for, without memory behind them.
Tensors empty_tensors(const KernelPlan& plan);

// Of all tensors. In floating point, which no size overflows.
double tensor_bytes(const KernelPlan& plan);

// The structure of a plan without tensors: for roofline predictions on any device.
inline std::unique_ptr<Executable> plan_empty(const KernelPlan& plan) { return plan.plan(empty_tensors(plan)); }

// "b32_s16_t4096_h128_d128_p64_bfloat16": names directories and cache files.
std::string problem_key(KernelPlan& plan);
// What is run, for people: that key and, a line each, the kernels with their present tilings.
std::string run_text(KernelPlan& plan, Executable& executable);

}  // namespace hypermla
