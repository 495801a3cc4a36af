#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>

#include "hypermla/base/error.h"
#include "hypermla/base/hash.h"
#include "hypermla/device/driver.h"

namespace hypermla {
namespace {

// Makes a context the thread's while it lives: a new thread has none, and the caller's may be another device's.
class Current {
 public:
  explicit Current(CUcontext context) {
    CUcontext callers = nullptr;
    pushed_ = cuda_.cuCtxGetCurrent(&callers) == CUDA_SUCCESS && callers != context &&
              cuda_.cuCtxPushCurrent(context) == CUDA_SUCCESS;
  }
  Current(const Current&) = delete;
  ~Current() {
    CUcontext context = nullptr;
    if (pushed_) cuda_.cuCtxPopCurrent(&context);
  }

 private:
  const CudaDriver& cuda_ = CudaDriver::get();
  bool pushed_;
};

// A device's primary context and the kernels in it, each loaded once. Both stay until the process ends: a caller's CUDA
// graph may hold a kernel longer than its Kernel lives, and the driver crashes when it frees such a graph after the
// module.
class PrimaryContext {
 public:
  static PrimaryContext& of(CUdevice device) {
    static std::mutex mutex;
    static std::map<CUdevice, PrimaryContext> all;
    const std::lock_guard lock(mutex);
    return all.try_emplace(device, device).first->second;
  }
  explicit PrimaryContext(CUdevice device) { HYPERMLA_CUDA(cuDevicePrimaryCtxRetain(&context_, device)); }
  CUcontext get() const { return context_; }

  CUfunction load(const std::string& image, const std::string& name, unsigned shared_bytes) {
    const std::lock_guard lock(mutex_);
    CUmodule& module = modules_[content_hash(image)];
    if (!module) HYPERMLA_CUDA(cuModuleLoadData(&module, image.data()));
    CUfunction function = nullptr;
    HYPERMLA_CUDA(cuModuleGetFunction(&function, module, name.c_str()));
    HYPERMLA_CUDA(cuFuncLoad(function));  // the driver loads lazily; without this the first run() would be slow
    constexpr int kUnasked = 48 << 10;    // more dynamic shared memory needs an attribute
    int allowed = 0;                      // set when it was loaded before
    HYPERMLA_CUDA(cuFuncGetAttribute(&allowed, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, function));
    if (int(shared_bytes) > std::max(allowed, kUnasked))
      HYPERMLA_CUDA(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, int(shared_bytes)));
    return function;
  }

 private:
  CUcontext context_ = nullptr;
  std::mutex mutex_;
  std::map<std::string, CUmodule> modules_;  // by the hash of their image
};

class CudaFunction : public Function {
 public:
  CudaFunction(CUcontext context, CUfunction function, const LaunchShape& shape)
      : context_(context), function_(function) {
    config_.blockDimX = shape.threads;
    config_.blockDimY = config_.blockDimZ = 1;
    config_.sharedMemBytes = shape.shared_bytes;
    config_.attrs = attributes_;
    if (shape.cluster > 1) {
      CUlaunchAttribute& attribute = attributes_[config_.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      attribute.value.clusterDim = {shape.cluster, 1, 1};
    }
    if (shape.overlaps_previous) {
      CUlaunchAttribute& attribute = attributes_[config_.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      attribute.value.programmaticStreamSerializationAllowed = 1;
    }
  }
  CudaFunction(const CudaFunction&) = delete;  // config_ points into this object
  CudaFunction& operator=(const CudaFunction&) = delete;

  void launch(Grid grid, void** arguments, StreamHandle stream) override {
    config_.gridDimX = grid.x;
    config_.gridDimY = grid.y;
    config_.gridDimZ = grid.z;
    config_.hStream = static_cast<CUstream>(stream);
    const Current here(context_);
    HYPERMLA_CUDA(cuLaunchKernelEx(&config_, function_, arguments, nullptr));
  }

 private:
  CUcontext context_;
  CUfunction function_;
  CUlaunchConfig config_{};
  CUlaunchAttribute attributes_[2]{};
};

class CudaRecording : public Recording {
 public:
  explicit CudaRecording(CUgraphExec graph) : graph_(graph) {}
  ~CudaRecording() override { CudaDriver::get().cuGraphExecDestroy(graph_); }
  void replay(StreamHandle stream) override { HYPERMLA_CUDA(cuGraphLaunch(graph_, static_cast<CUstream>(stream))); }

 private:
  CUgraphExec graph_;
};

// SMs of their own for some streams. A module that the device's context loaded runs there as well.
class GreenContext {
 public:
  GreenContext(CUdevice device, CUdevResource resource) : processors_(int(resource.sm.smCount)) {
    CUdevResourceDesc description = nullptr;
    HYPERMLA_CUDA(cuDevResourceGenerateDesc(&description, &resource, 1));
    const CUresult made =
        CudaDriver::get().cuGreenCtxCreate(&context_, description, device, CU_GREEN_CTX_DEFAULT_STREAM);
    if (made == CUDA_ERROR_NOT_SUPPORTED)
      fail(
          "the driver does not divide the multiprocessors of this process among streams (cuGreenCtxCreate: operation "
          "not supported), as was seen after counters had been read in it; use a process of its own");
    cuda_check(made, "cuGreenCtxCreate");
  }
  GreenContext(const GreenContext&) = delete;
  ~GreenContext() { CudaDriver::get().cuGreenCtxDestroy(context_); }
  CUgreenCtx get() const { return context_; }
  int processors() const { return processors_; }

 private:
  CUgreenCtx context_ = nullptr;
  int processors_ = 0;
};
using Partition = std::vector<std::unique_ptr<GreenContext>>;

// For the streams of a green context, or with null of the device's context: an event is recorded on streams of
// its own context only.
CUevent make_event(const GreenContext* green) {
  CUevent event = nullptr;
  CUcontext context = nullptr;
  if (green) {
    HYPERMLA_CUDA(cuCtxFromGreenCtx(&context, green->get()));
    HYPERMLA_CUDA(cuCtxPushCurrent(context));
  }
  const CUresult result = CudaDriver::get().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
  if (green) HYPERMLA_CUDA(cuCtxPopCurrent(&context));
  cuda_check(result, "cuEventCreate");
  return event;
}

class CudaStreams : public StreamGroup {
 public:
  // Each stream in its own green context of the partition; without one, all in the device's context.
  CudaStreams(std::shared_ptr<Device> device, CUcontext context, std::size_t count,
              const std::shared_ptr<Partition>& partition)
      : device_(std::move(device)), context_(context), partition_(partition) {
    const Current here(context_);
    fork_ = make_event(nullptr);
    for (std::size_t i = 0; i < count; ++i) add(partition_ ? (*partition_)[i].get() : nullptr);
  }
  // All in one green context, forked from a stream of it.
  CudaStreams(std::shared_ptr<Device> device, CUcontext context, std::size_t count,
              const std::shared_ptr<Partition>& partition, const GreenContext* green)
      : device_(std::move(device)), context_(context), partition_(partition) {
    const Current here(context_);
    fork_ = make_event(green);
    for (std::size_t i = 0; i < count; ++i) add(green);
  }
  ~CudaStreams() override {
    const CudaDriver& cuda = CudaDriver::get();
    for (const Branch& branch : branches_) {
      if (branch.done) cuda.cuEventDestroy(branch.done);
      if (branch.stream) cuda.cuStreamDestroy(branch.stream);
    }
    cuda.cuEventDestroy(fork_);
  }

  StreamHandle stream(std::size_t i) const override { return branches_[i].stream; }
  int processors(std::size_t i) const override {
    return branches_[i].green ? branches_[i].green->processors() : device_->info().processors;
  }
  std::unique_ptr<StreamGroup> inside(std::size_t i, std::size_t count) const override {
    return std::make_unique<CudaStreams>(device_, context_, count, partition_, branches_[i].green);
  }
  void fork(StreamHandle from) override {
    HYPERMLA_CUDA(cuEventRecord(fork_, static_cast<CUstream>(from)));
    for (const Branch& branch : branches_) HYPERMLA_CUDA(cuStreamWaitEvent(branch.stream, fork_, 0));
  }
  void join(StreamHandle to) override {
    for (const Branch& branch : branches_) {
      HYPERMLA_CUDA(cuEventRecord(branch.done, branch.stream));
      HYPERMLA_CUDA(cuStreamWaitEvent(static_cast<CUstream>(to), branch.done, 0));
    }
  }

 private:
  struct Branch {
    CUstream stream = nullptr;
    CUevent done = nullptr;
    const GreenContext* green = nullptr;  // of partition_
  };
  void add(const GreenContext* green) {
    Branch& branch = branches_.emplace_back();
    branch.green = green;
    if (green)
      HYPERMLA_CUDA(cuGreenCtxStreamCreate(&branch.stream, green->get(), CU_STREAM_NON_BLOCKING, 0));
    else
      HYPERMLA_CUDA(cuStreamCreate(&branch.stream, CU_STREAM_NON_BLOCKING));
    branch.done = make_event(green);
  }
  std::shared_ptr<Device> device_;  // its context outlives the streams
  CUcontext context_;
  std::shared_ptr<Partition> partition_;
  CUevent fork_ = nullptr;
  std::vector<Branch> branches_;
};

class CudaDevice : public Device {
 public:
  explicit CudaDevice(int ordinal) {
    require_own_driver();
    int count = 0;
    HYPERMLA_CUDA(cuDeviceGetCount(&count));
    if (ordinal < 0 || ordinal >= count)
      fail("there is no CUDA device {}: this machine has {}; choose --device=cpu or one below that number", ordinal,
           count);
    HYPERMLA_CUDA(cuDeviceGet(&device_, ordinal));
    context_ = PrimaryContext::of(device_).get();
    CUcontext callers = nullptr;
    HYPERMLA_CUDA(cuCtxGetCurrent(&callers));
    if (!callers) HYPERMLA_CUDA(cuCtxSetCurrent(context_));
    const Current here(context_);
    char name[256] = "";
    HYPERMLA_CUDA(cuDeviceGetName(name, sizeof name, device_));
    std::size_t memory = 0;
    HYPERMLA_CUDA(cuDeviceTotalMem(&memory, device_));
    int version = 0;
    HYPERMLA_CUDA(cuDriverGetVersion(&version));
    power_ = PowerMeter(fmt::format("{:08x}:{:02x}:{:02x}.0", attribute(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID),
                                    attribute(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID),
                                    attribute(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)));
    info_.name = name;
    info_.arch = fmt::format("sm_{}{}", attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                             attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
    info_.processors = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    info_.memory_bytes = memory;
    info_.cache_bytes = static_cast<std::size_t>(attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE));
    info_.driver = fmt::format("{}.{} ({})", version / 1000, version % 1000 / 10, power_.driver_version());
    HYPERMLA_CUDA(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
    HYPERMLA_CUDA(cuEventCreate(&begin_, CU_EVENT_DEFAULT));
    HYPERMLA_CUDA(cuEventCreate(&end_, CU_EVENT_DEFAULT));
  }
  ~CudaDevice() override {
    const Current here(context_);
    const CudaDriver& cuda = CudaDriver::get();
    partitions_.clear();
    if (flush_) cuda.cuMemFree(flush_);
    cuda.cuEventDestroy(begin_);
    cuda.cuEventDestroy(end_);
    cuda.cuStreamDestroy(stream_);
  }

  bool is_gpu() const override { return true; }

  void* allocate(std::size_t bytes) override {
    const Current here(context_);
    CUdeviceptr data = 0;
    if (CudaDriver::get().cuMemAlloc(&data, std::max<std::size_t>(bytes, 1)) != CUDA_SUCCESS) {
      std::size_t free = 0, total = 0;
      CudaDriver::get().cuMemGetInfo(&free, &total);
      fail("{:.2f} GB of device memory do not fit: {:.2f} of {:.2f} GB are free; choose a smaller problem or capacity",
           bytes / 1e9, free / 1e9, total / 1e9);
    }
    return reinterpret_cast<void*>(data);
  }
  void release(void* data) noexcept override {
    const Current here(context_);
    CudaDriver::get().cuMemFree(address(data));
  }
  void copy_to_device(void* to, const void* from, std::size_t bytes) override {
    const Current here(context_);
    HYPERMLA_CUDA(cuMemcpyHtoD(address(to), from, bytes));
    end_of_copy();
  }
  void copy_to_host(void* to, const void* from, std::size_t bytes) override {
    const Current here(context_);
    HYPERMLA_CUDA(cuMemcpyDtoH(to, address(const_cast<void*>(from)), bytes));
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    const Current here(context_);
    HYPERMLA_CUDA(cuMemcpyDtoD(address(to), address(const_cast<void*>(from)), bytes));
    end_of_copy();
  }
  void fill(void* data, unsigned char byte, std::size_t bytes) override {
    const Current here(context_);
    if (bytes) HYPERMLA_CUDA(cuMemsetD8(address(data), byte, bytes));
    synchronize();
  }
  void fill_words(void* data, std::uint32_t word, std::size_t count, StreamHandle stream) override {
    const Current here(context_);
    HYPERMLA_CUDA(cuMemsetD32Async(address(data), word, count, static_cast<CUstream>(stream)));
  }

  std::unique_ptr<Function> load(const std::filesystem::path& artifact, const std::string& name,
                                 const LaunchShape& shape) override {
    std::ifstream file(artifact, std::ios::binary);
    std::string image((std::istreambuf_iterator<char>(file)), {});
    const Current here(context_);
    return std::make_unique<CudaFunction>(context_, PrimaryContext::of(device_).load(image, name, shape.shared_bytes),
                                          shape);
  }

  void make_current() override { HYPERMLA_CUDA(cuCtxSetCurrent(context_)); }
  StreamHandle stream() override { return stream_; }
  void synchronize() override {
    const Current here(context_);
    HYPERMLA_CUDA(cuCtxSynchronize());
  }
  std::unique_ptr<StreamGroup> streams(std::size_t count, const std::vector<int>& partition) override {
    return std::make_unique<CudaStreams>(shared_from_this(), context_, count,
                                         partition.empty() ? nullptr : split(partition));
  }

  std::unique_ptr<Recording> record(const Work& work) override {
    CUgraph graph = nullptr;
    HYPERMLA_CUDA(cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    try {
      work(stream_);
    } catch (...) {
      CudaDriver::get().cuStreamEndCapture(stream_, &graph);
      if (graph) CudaDriver::get().cuGraphDestroy(graph);
      throw;
    }
    HYPERMLA_CUDA(cuStreamEndCapture(stream_, &graph));
    CUgraphExec executable = nullptr;
    CUresult result = CudaDriver::get().cuGraphInstantiate(&executable, graph, 0);
    CudaDriver::get().cuGraphDestroy(graph);
    cuda_check(result, "cuGraphInstantiate");
    return std::make_unique<CudaRecording>(executable);
  }

  double time(const Work& work) override {
    HYPERMLA_CUDA(cuEventRecord(begin_, stream_));
    work(stream_);
    HYPERMLA_CUDA(cuEventRecord(end_, stream_));
    HYPERMLA_CUDA(cuEventSynchronize(end_));
    float milliseconds = 0;
    HYPERMLA_CUDA(cuEventElapsedTime(&milliseconds, begin_, end_));
    return milliseconds * 1e-3;
  }

  void flush_cache(StreamHandle stream) override {
    const Current here(context_);
    const std::size_t bytes = 2 * info_.cache_bytes;
    if (!flush_) HYPERMLA_CUDA(cuMemAlloc(&flush_, bytes));
    HYPERMLA_CUDA(cuMemsetD32Async(flush_, 0, bytes / 4, static_cast<CUstream>(stream)));
  }

  std::optional<PowerSample> power() override { return power_.sample(); }

 private:
  // A copy from pageable memory may return while its last part is on its way, and the device's streams do not wait for
  // the default stream, on which it was made.
  void end_of_copy() { HYPERMLA_CUDA(cuStreamSynchronize(nullptr)); }

  // Kept for later calls: a green context costs milliseconds and memory.
  std::shared_ptr<Partition> split(const std::vector<int>& wanted) {
    std::shared_ptr<Partition>& partition = partitions_[wanted];
    if (partition) return partition;
    if (wanted.size() != 2) fail("a GPU is cut into two partitions, not {}; let the others share one", wanted.size());
    if (std::min(wanted[0], wanted[1]) < 1 || wanted[0] + wanted[1] > info_.processors)
      fail("partitions of {} and {} SMs do not fit: this device has {}", wanted[0], wanted[1], info_.processors);
    CUdevResource whole{}, parts[2]{};
    HYPERMLA_CUDA(cuDeviceGetDevResource(device_, &whole, CU_DEV_RESOURCE_TYPE_SM));
    // The part that is split off is rounded up, and the other gets the rest. Either part may be the one that fits.
    bool fits = false;
    for (const std::size_t first : {0, 1}) {
      unsigned groups = 1;
      HYPERMLA_CUDA(
          cuDevSmResourceSplitByCount(&parts[first], &groups, &whole, &parts[1 - first], 0, unsigned(wanted[first])));
      fits = groups == 1 && int(parts[0].sm.smCount) >= wanted[0] && int(parts[1].sm.smCount) >= wanted[1];
      if (fits) break;
    }
    if (!fits)
      fail("partitions of {} and {} SMs do not fit: this device would split itself into {} and {}; choose other sizes",
           wanted[0], wanted[1], parts[0].sm.smCount, parts[1].sm.smCount);
    auto made = std::make_shared<Partition>();
    for (const CUdevResource& part : parts) made->push_back(std::make_unique<GreenContext>(device_, part));
    return partition = made;
  }
  static CUdeviceptr address(void* data) { return reinterpret_cast<CUdeviceptr>(data); }
  int attribute(CUdevice_attribute which) const {
    int value = 0;
    HYPERMLA_CUDA(cuDeviceGetAttribute(&value, which, device_));
    return value;
  }

  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUevent begin_ = nullptr, end_ = nullptr;
  CUdeviceptr flush_ = 0;
  std::map<std::vector<int>, std::shared_ptr<Partition>> partitions_;
  PowerMeter power_{""};
};

}  // namespace

std::shared_ptr<Device> make_cuda_device(int ordinal) { return std::make_shared<CudaDevice>(ordinal); }

std::optional<std::string> cuda_unavailable() {
  require_own_driver();  // a child must not go on with the CPU unnoticed
  try {
    int count = 0;
    HYPERMLA_CUDA(cuDeviceGetCount(&count));
    if (count == 0) return "the CUDA driver sees no GPU";
    return std::nullopt;
  } catch (const Error& error) {
    return error.what();
  }
}

std::shared_ptr<Device> make_device(const std::string& name) {
  if (name == "cpu") return make_cpu_device();
  if (name == "auto") return cuda_unavailable() ? make_cpu_device() : make_cuda_device();
  if (name == "cuda") return make_cuda_device();
  if (name.rfind("cuda:", 0) == 0 && name.size() > 5 && name.find_first_not_of("0123456789", 5) == std::string::npos &&
      name.size() < 9)
    return make_cuda_device(std::stoi(name.substr(5)));
  fail("unknown device '{}'; choose auto, cpu, cuda or cuda:N", name);
}

}  // namespace hypermla
