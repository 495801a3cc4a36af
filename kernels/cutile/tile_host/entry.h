// The C entry of a kernel compiled for the CPU. A source names one instantiation, in parentheses, and becomes a shared
// library:
//   #include "flash_attention.cuh"
//   #include "entry.h"
//   HYPERMLA_TILE_HOST_ENTRY((hypermla::flash_attention<Problem{...}, Tiling{...}>))
// defines
//   extern "C" const char* hypermla_launch(void** args, unsigned grid_x, unsigned grid_y, unsigned grid_z, int threads);
// args[i] points to the i-th kernel argument, as for cuLaunchKernel. Runs all blocks; returns null, or what went wrong
// (an access out of bounds, an uninitialised tile, ...) as text that lives until the next call. threads = 0 takes every
// core that the process may use. Calls from several threads run one after the other.
#pragma once

#include <cuda_tile.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#pragma GCC visibility push(hidden)
#include "host/pool.h"

namespace cuda::tiles::host {

template <auto kernel>
struct Launcher;

template <class... Args, void (*kernel)(Args...)>
struct Launcher<kernel> {
  static const char* launch(void** args, dim3 grid, int threads) {
    static Pool pool;
    return pool.run(std::uint64_t{grid.x} * grid.y * grid.z, threads, [&](std::uint64_t i) {
      const auto x = static_cast<unsigned>(i % grid.x), y = static_cast<unsigned>(i / grid.x % grid.y);
      const auto z = static_cast<unsigned>(i / grid.x / grid.y);
      position = {{x, y, z}, grid};
      try {
        [&]<std::size_t... n>(std::index_sequence<n...>) {
          kernel(*static_cast<std::remove_reference_t<Args>*>(args[n])...);
        }
        (std::index_sequence_for<Args...>{});
      } catch (const Trap& trap) {
        throw Trap("block (" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) +
                   "): " + trap.what());
      }
    });
  }
};

}  // namespace cuda::tiles::host
#pragma GCC visibility pop

#define HYPERMLA_TILE_HOST_UNWRAP(...) __VA_ARGS__
#define HYPERMLA_TILE_HOST_ENTRY(kernel)                                                                               \
  extern "C" [[gnu::visibility("default")]] const char* hypermla_launch(void** args, unsigned grid_x, unsigned grid_y, \
                                                                        unsigned grid_z, int threads) {                \
    return cuda::tiles::host::Launcher<&HYPERMLA_TILE_HOST_UNWRAP kernel>::launch(args, {grid_x, grid_y, grid_z},      \
                                                                                  threads);                            \
  }
