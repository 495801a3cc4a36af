// The C entry of a kernel compiled for the CPU. A source names one instantiation, in parentheses, and becomes a shared
// library:
//   #include "flash_attention.cuh"
//   #include "entry.h"
//   HYPERMLA_TILE_HOST_ENTRY((hypermla::flash_attention<Problem{...}, Tiling{...}>))
// defines
//   extern "C" const char* hypermla_run_block(void** args, const unsigned* grid, std::uint64_t block);
// args[i] points to the i-th kernel argument, as for cuLaunchKernel; grid holds x, y and z; blocks count with x
// fastest. Threads may run blocks at the same time. Returns null, or what went wrong (an access out of bounds, an
// uninitialised tile, ...) as text that lives until this thread's next call. The section hypermla_parameters holds the
// bytes of each of the kernel's parameters, an int for each: what its plan passes is compared with them.
#pragma once

#include <cuda_tile.h>

#include <cstdio>
#include <exception>

#pragma GCC visibility push(hidden)

namespace cuda::tiles::host {

inline thread_local char failure[512];  // of this thread's last block that failed

template <auto kernel>
struct Launcher;

template <class... Args, void (*kernel)(Args...)>
struct Launcher<kernel> {
  static constexpr std::array<int, sizeof...(Args)> parameters = {int(sizeof(Args))...};
  static const char* run_block(void** args, dim3 grid, std::uint64_t i) {
    const auto x = static_cast<unsigned>(i % grid.x), y = static_cast<unsigned>(i / grid.x % grid.y);
    const auto z = static_cast<unsigned>(i / grid.x / grid.y);
    position = {{x, y, z}, grid};
    try {
      [&]<std::size_t... n>(std::index_sequence<n...>) {
        kernel(*static_cast<std::remove_reference_t<Args>*>(args[n])...);
      }
      (std::index_sequence_for<Args...>{});
      return nullptr;
    } catch (const Trap& trap) {
      std::snprintf(failure, sizeof failure, "block (%u, %u, %u): %s", x, y, z, trap.what());
    } catch (const std::exception& error) {
      std::snprintf(failure, sizeof failure, "%s", error.what());
    } catch (...) {
      std::snprintf(failure, sizeof failure, "a kernel threw something that is no std::exception");
    }
    return failure;
  }
};

}  // namespace cuda::tiles::host
#pragma GCC visibility pop

#define HYPERMLA_TILE_HOST_UNWRAP(...) __VA_ARGS__
#define HYPERMLA_TILE_HOST_ENTRY(kernel)                                                                      \
  [[gnu::used, gnu::section("hypermla_parameters")]] static constexpr auto hypermla_parameters =              \
      cuda::tiles::host::Launcher<&HYPERMLA_TILE_HOST_UNWRAP kernel>::parameters;                             \
  extern "C" [[gnu::visibility("default")]] const char* hypermla_run_block(void** args, const unsigned* grid, \
                                                                           std::uint64_t block) {             \
    return cuda::tiles::host::Launcher<&HYPERMLA_TILE_HOST_UNWRAP kernel>::run_block(                         \
        args, {grid[0], grid[1], grid[2]}, block);                                                            \
  }
