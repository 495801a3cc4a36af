// A step of a serving engine: two requests, one with a draft, over a paged cache. It runs on the CPU, so it needs no
// CUDA calls for memory; on a GPU the pointers are the device's, and plan() and run() take a stream.
#include <hypermla/mla_decode.h>

#include <cstdio>
#include <vector>

int main() try {
  constexpr int kHeads = 16, kPage = 64, kPages = 8, kLayers = 3;
  hypermla::MlaDecode decode({.heads = kHeads, .max_requests = 4, .max_queries = 2, .max_tokens = 256, .page = kPage},
                             hypermla::DeviceHandle("cpu"));
  std::puts(decode.explain().c_str());
  // Requests of 100 and 30 tokens, the new ones included; the first has 2 queries. Pages 5, 2 and 7 of each cache.
  const std::vector<int> lengths = {100, 30}, query_starts = {0, 2, 3}, block_table = {5, 2, 7, 0};
  const std::vector<unsigned short> q(3 * kHeads * 576, 0x3f80);  // 1.0 in bfloat16
  std::vector<unsigned short> o(3 * kHeads * 512);
  std::vector<float> lse(3 * kHeads);

  decode.plan(lengths.data(), query_starts.data(), 2);
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::vector<unsigned short> cache(std::size_t(kPages) * kPage * 576, 0x3c00);  // 2^-7; append() of an engine
    decode.run(hypermla::MlaDecodeTensors::fused(kHeads, kPage, q.data(), 3, cache.data(), kPages, block_table.data(),
                                                 2, o.data(), lse.data()));
  }
  std::printf("lse %.4f %.4f %.4f\n", lse[0], lse[kHeads], lse[2 * kHeads]);  // 0.3248 + ln of 99, 100 and 30
} catch (const hypermla::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
