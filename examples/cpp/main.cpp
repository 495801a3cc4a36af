// Attention of 16 queries over 1024 tokens, as in speculative decoding, from C++. It runs on the CPU, so it
// needs no CUDA calls for memory.
#include <hypermla/hypermla.h>

#include <cstdio>
#include <cstdlib>

int main() try {
  const hypermla::DeviceHandle device("cpu");
  hypermla::Kernel kernel("flash_attention", {{"b", "1"}, {"s", "16"}, {"t", "1024"}, {"h", "4"}, {"dtype", "float16"}},
                          device);
  for (const hypermla::TensorInfo& tensor : kernel.tensors()) {
    void* data = std::aligned_alloc(16, (tensor.bytes + 15) / 16 * 16);
    auto* values = static_cast<unsigned short*>(data);
    if (tensor.is_input)
      for (std::size_t i = 0; i < tensor.bytes / 2; ++i) values[i] = 0x3c00;  // 1.0
    kernel.bind(tensor.name, data);
  }
  kernel.run();
  const hypermla::ProfileSummary profile = kernel.profile("event", {.bench_runs = 3});
  std::printf("flash_attention took %.1f us on %s, see %s/report.md; an H200 would take %.1f us\n",
              profile.cold.median_us, device.name().c_str(), profile.directory.c_str(),
              kernel.predicted_seconds("NVIDIA H200") * 1e6);
} catch (const hypermla::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
