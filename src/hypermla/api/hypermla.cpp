#include "hypermla/hypermla.h"

#include <algorithm>
#include <mutex>
#include <random>

#include "hypermla/api/shared.h"
#include "hypermla/plan/check.h"
#include "hypermla/plan/choice.h"
#include "hypermla/plan/registry.h"
#include "hypermla/plan/status.h"
#include "hypermla/plan/verify.h"
#include "hypermla/profile/metrics.h"
#include "hypermla/profile/profilers.h"
#include "hypermla/tune/autotune.h"
#include "hypermla/tune/tune_n.h"

namespace hypermla {
namespace {

ProfileSummary summary_of(const ProfileResult& result) {
  const Profile& profile = result.profile;
  ProfileSummary summary{result.directory.string(), profile.missing,    profile.timing.cold,   profile.timing.burst,
                         profile.timing.sustained,  profile.bottleneck, profile.opportunities, {}};
  for (const ProfileStage& stage : profile.stages)
    summary.stages.push_back({stage.name, stage.burst, metrics_of(stage)});
  return summary;
}

// Thread blocks read inputs that others do not, and at other times: an output in the memory of an input, or of another
// output, is overwritten before it was read.
void refuse_shared_memory(const std::vector<TensorInfo>& infos, const Tensors& tensors) {
  auto begin = [&](const TensorInfo& info) { return reinterpret_cast<std::uintptr_t>(tensors.at(info.name).data); };
  for (const TensorInfo& written : infos)
    for (const TensorInfo& other : infos)
      if (!written.is_input && &written != &other && begin(written) < begin(other) + other.bytes &&
          begin(other) < begin(written) + written.bytes)
        fail("tensors '{}' and '{}' share memory, and the kernel writes the first; give each memory of its own",
             written.name, other.name);
}

}  // namespace

DeviceHandle::DeviceHandle(const std::string& name) : said_(name), device_(make_device(name)) {}
std::string DeviceHandle::name() const { return device_->info().name; }
bool DeviceHandle::is_gpu() const { return device_->is_gpu(); }
void DeviceHandle::synchronize() const { device_->synchronize(); }

struct Kernel::State {
  State(const std::string& kernel, const std::string& its_version, const std::string& its_language, const Json& problem,
        const std::string& its_device, std::shared_ptr<Device> present)
      : name(kernel),
        version(its_version),
        language(its_language),
        device_name(its_device),
        said{.problem = problem},
        device(std::move(present)) {}

  // For the present device, with the n that tuning on it found fastest (tune/tune_n.h) where that is left open.
  ConfiguredPlan configured_here() const {
    ConfiguredPlan made = configured_for(planned);
    const bool open = made.chosen.contains("n") && said.problem.value("n", "-1") == "-1";
    if (!open) return made;
    Json problem = to_json(made.plan->problem_fields());
    problem["n"] = -1;
    const std::optional<int> n =
        remembered_n(made.entry, planned, problem, *device, shared().compiler, shared().environment.history_root());
    if (!n) return made;
    problem["n"] = *n;
    return configure({made.entry}, planned, {.offered = problem});
  }
  ConfiguredPlan configured_for(const PlannedDevice& on) const {
    return configure(Registry::instance().find_all(name, version, on.target.arch, language), on, said);
  }

  std::string name, version, language, device_name;
  Settings said;
  std::shared_ptr<Device> device;
  PlannedDevice planned = planned_device(shared().devices, *device);
  ConfiguredPlan configured = configured_here();
  // On a CPU values of lengths and indices that would lead a kernel out of its tensors are found here. Those of a GPU
  // are in its memory, where only a kernel could look.
  void require_indices() const {
    if (!device->is_gpu()) hypermla::require_indices(specs, tensors);
  }
  // Over the bound tensors, with the tilings that tune() chose; not prepared.
  std::unique_ptr<Executable> plan() const {
    for (const auto& [tensor, its] : tensors)
      if (!its.data) fail("tensor '{}' is not bound; call bind(\"{}\", pointer) first", tensor, tensor);
    refuse_shared_memory(infos, tensors);
    auto planned_executable = configured.plan->plan(tensors);
    for (TiledKernel* kernel : planned_executable->kernels())
      for (const AutotuneResult::Stage& tuned : tuning.stages)
        if (tuned.kernel == kernel->name()) kernel->set_tiling(tuned.tiling);
    return planned_executable;
  }

  std::vector<TensorSpec> specs = configured.plan->tensors();
  std::vector<TensorInfo> infos;
  Tensors tensors;
  AutotuneResult tuning;                   // what tune() chose
  std::unique_ptr<Executable> executable;  // prepared over the bound tensors; null after a bind()
  bool has_run = false;                    // over the bound tensors
};

Kernel::Kernel(const std::string& name, const std::map<std::string, std::string>& problem, const DeviceHandle& device,
               const std::string& version, const std::string& language)
    : state_(std::make_unique<State>(name, version, language, problem, device.said_, device.device_)) {
  state_->tensors = empty_tensors(*state_->configured.plan);
  for (const TensorSpec& spec : state_->specs)
    state_->infos.push_back({spec.name, spec.shape, spec.dtype, spec.role == Role::input, spec.role == Role::workspace,
                             state_->tensors[spec.name].bytes()});
}
Kernel::~Kernel() = default;
Kernel::Kernel(Kernel&&) noexcept = default;
Kernel& Kernel::operator=(Kernel&&) noexcept = default;

std::vector<std::string> Kernel::list() {
  std::vector<std::string> names;
  for (const KernelEntry& entry : Registry::instance().all())
    if (std::find(names.begin(), names.end(), entry.name()) == names.end()) names.push_back(entry.name());
  return names;
}

const std::vector<TensorInfo>& Kernel::tensors() const { return state_->infos; }

void Kernel::bind(const std::string& tensor, void* data) {
  auto found = state_->tensors.find(tensor);
  if (found == state_->tensors.end()) {
    std::vector<std::string> names;
    for (const TensorInfo& info : state_->infos) names.push_back(info.name);
    fail("there is no tensor '{}'; this kernel has {}", tensor, fmt::join(names, ", "));
  }
  if (!data || reinterpret_cast<std::uintptr_t>(data) % 16 != 0)
    fail("tensor '{}' must be bound to 16-byte aligned memory", tensor);
  if (found->second.data == data) return;
  found->second.data = data;
  state_->executable.reset();
  state_->has_run = false;
}

void Kernel::prepare() {
  if (state_->executable) return;
  auto executable = state_->plan();
  executable->prepare(shared().compiler, *state_->device);
  state_->executable = std::move(executable);
}

std::vector<std::string> Kernel::tune(const TuneOptions& asked) {
  auto executable = state_->plan();
  state_->require_indices();
  AutotuneOptions options;
  options.history_root = shared().environment.history_root();
  options.retune = asked.retune;
  options.tuner.max_iterations = asked.max_iterations;
  options.poll = [&] {
    if (asked.stop && asked.stop()) fail("tuning was stopped; call tune() again to go on where it was");
  };
  state_->tuning = autotune(*state_->configured.plan, *executable, shared().compiler, *state_->device,
                            state_->planned.spec, options);
  state_->executable = std::move(executable);
  return remarks(state_->tuning);
}

void Kernel::run(void* stream) {
  state_->require_indices();
  if (!state_->executable) prepare();
  state_->executable->run(stream);
  state_->has_run = true;
}

void Kernel::check() const {
  // On a CPU run() has looked.
  if (state_->device->is_gpu() && state_->has_run) check_status(state_->specs, state_->tensors, *state_->device);
}

ProfileSummary Kernel::profile(const std::string& mode, const ProfileOptions& options) {
  const ProfileMode wanted = profile_mode_from_name(mode);
  if (options.bench_runs < 1) fail("bench_runs is {}; a measurement takes at least 1", options.bench_runs);
  state_->require_indices();
  require_out_dir(options.out_dir);
  prepare();
  return summary_of(hypermla::profile({.kernel = state_->configured.entry,
                                       .plan = *state_->configured.plan,
                                       .executable = *state_->executable,
                                       .device = *state_->device,
                                       .spec = state_->planned.spec,
                                       .tuning = state_->tuning,
                                       .out_dir = options.out_dir,
                                       .bench_runs = options.bench_runs,
                                       .label = options.label,
                                       .device_name = state_->device_name,
                                       .tools = shared().environment.profile_tools},
                                      wanted));
}

std::vector<ListedKernel> list_kernels() {
  std::vector<ListedKernel> all;
  for (const KernelEntry& entry : Registry::instance().all())
    all.push_back({entry.name(), entry.full_name(), entry.language, entry.version, entry.summary, entry.draft});
  return all;
}

// A kernel on random inputs in memory of its own: what one call checks or profiles.
class OwnInputs {
 public:
  OwnInputs(const std::string& name, const std::map<std::string, std::string>& problem, const DeviceHandle& on,
            const RunOptions& options)
      : seed(options.seed ? options.seed : std::random_device{}()),
        device_name(on.said_),
        device(on.device_),
        planned(planned_device(shared().devices, *device)),
        configured(
            configure(Registry::instance().find_all(name, options.version, planned.target.arch, options.language),
                      planned, {.problem = problem})),
        tensors(allocated()),
        executable(configured.plan->plan(tensors.tensors())) {
    if (!options.tune) {
      executable->prepare(shared().compiler, *device);
      return;
    }
    AutotuneOptions tune;
    tune.history_root = shared().environment.history_root();
    tune.poll = [&] {
      if (options.stop && options.stop()) fail("tuning was stopped; call this again to go on where it was");
    };
    tuning = autotune(*configured.plan, *executable, shared().compiler, *device, planned.spec, tune);
  }

  static std::shared_ptr<Device> device_of(const DeviceHandle& handle) { return handle.device_; }

  const std::uint64_t seed;
  const std::string device_name;
  const std::shared_ptr<Device> device;
  const PlannedDevice planned;
  const ConfiguredPlan configured;
  AllocatedTensors tensors;
  const std::unique_ptr<Executable> executable;
  AutotuneResult tuning;

 private:
  AllocatedTensors allocated() const {
    require_memory(*configured.plan, device->info());
    return AllocatedTensors(*configured.plan, device, seed);
  }
};

CheckSummary check_kernel(const std::string& name, const std::map<std::string, std::string>& problem,
                          const DeviceHandle& device, const RunOptions& options) {
  OwnInputs on(name, problem, device, options);
  const KernelEntry& entry = on.configured.entry;
  CheckSummary summary{true, entry.full_name(), on.seed, {}};
  for (const auto& [inputs, result] :
       check_inputs(entry, *on.configured.plan, *on.executable, on.tensors, on.device, shared().compiler, on.seed)) {
    summary.passed &= result.passed;
    for (const OutputError& one : result.outputs)
      summary.outputs.push_back({inputs, one.output, one.passed, one.relative_norm});
  }
  return summary;
}

ProfileSummary profile_kernel(const std::string& name, const std::map<std::string, std::string>& problem,
                              const std::string& mode, const DeviceHandle& device, const RunOptions& options,
                              const ProfileOptions& how) {
  const ProfileMode wanted = profile_mode_from_name(mode);
  if (how.bench_runs < 1) fail("bench_runs is {}; a measurement takes at least 1", how.bench_runs);
  require_out_dir(how.out_dir);
  const OwnInputs on(name, problem, device, options);
  return summary_of(profile({.kernel = on.configured.entry,
                             .plan = *on.configured.plan,
                             .executable = *on.executable,
                             .device = *on.device,
                             .spec = on.planned.spec,
                             .tuning = on.tuning,
                             .out_dir = how.out_dir,
                             .bench_runs = how.bench_runs,
                             .label = how.label,
                             .device_name = on.device_name,
                             .seed = on.seed,
                             .tools = shared().environment.profile_tools},
                            wanted));
}

std::vector<VerifySummary> verify_kernels(const std::string& name, const DeviceHandle& device,
                                          const VerifyOptions& options) {
  const std::shared_ptr<Device> present = OwnInputs::device_of(device);
  const std::string& arch = present->info().arch;
  std::vector<KernelEntry> entries = Registry::instance().all();
  if (!name.empty()) entries = {Registry::instance().find(name, options.version, arch, options.language)};
  std::erase_if(entries, [&](const KernelEntry& entry) {
    return !entry.runs_on(arch) || (!options.language.empty() && entry.language != options.language);
  });
  if (!options.record.empty()) read_records(options.record);
  std::vector<VerifySummary> all;
  for (const KernelEntry& entry : entries) {
    VerifySummary& summary = all.emplace_back();
    summary.kernel = entry.full_name();
    bool stopped = false;
    Tally tally;
    try {
      tally = verify(entry, present, shared().compiler,
                     {.say = [&](const std::string& lines) { summary.failures += lines; },
                      .begin =
                          [&](const std::string&) {
                            stopped = options.stop && options.stop();
                            if (stopped) fail("the verification was stopped");
                          }});
    } catch (const Error& error) {
      if (stopped || entries.size() == 1) throw;
      summary.failed = 1;  // those behind it are verified all the same
      summary.failures += fmt::format("FAILED {}: {}\n", summary.kernel, error.what());
      continue;
    }
    summary.cases = tally.cases;
    summary.failed = tally.failed;
    summary.worst_relative_errors = tally.worst;
    if (!options.record.empty()) record(options.record, entry, tally, *present, shared().compiler);
  }
  return all;
}

double Kernel::predicted_seconds(const std::string& device) const {
  const PlannedDevice on = device.empty() ? state_->planned : planned_device(shared().devices, device);
  const std::unique_ptr<KernelPlan> plan = state_->configured_for(on).plan;
  return plan_empty(*plan)->predict(on.spec, plan->dtype()).seconds;
}

std::vector<Choice> choose(const std::map<std::string, std::string>& problem, const std::string& device,
                           const std::string& language) {
  ChoiceProblem fields;
  set_fields("the choice", fields_of(fields), problem);
  const DeviceTable& table = shared().devices;
  const PlannedDevice on = device.empty() ? planned_device(table, *make_device("auto")) : planned_device(table, device);
  std::vector<Choice> choices;
  for (const RankedKernel& one : rank_kernels(Registry::instance(), fields, on, language))
    choices.push_back({std::string(path_name(one.path)), one.entry.full_name(), one.n, one.burst.seconds,
                       one.sustained.seconds, std::string(limit_name(one.sustained.limit)), one.entry.draft});
  return choices;
}

}  // namespace hypermla
