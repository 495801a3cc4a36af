// The one place that reads the environment and looks around the file system: where kernels, conf and caches are, and
// which compilers there are. Everything below takes paths.
//
//   HYPERMLA_ROOT        directory that holds kernels/, include/ and conf/   (default: found from this library's place)
//   HYPERMLA_CACHE_DIR   compiled kernels, tuning results, measured devices  (default: .cache in a checkout, else
//                        $XDG_CACHE_HOME/hypermla or ~/.cache/hypermla); absolute, and of this user or root alone
//   HYPERMLA_KERNELS     kernels of the user's own, laid out as kernels/ is: absolute, and of this user or root alone
//   HYPERMLA_CUDA_ROOT   root of CUDA 13.3 or newer, with tileiras: absolute (default: the wheels in .venv, CUDA_HOME)
//   CXX                  C++20 compiler for kernels on the CPU               (default: g++, then c++, then clang++)
//   HYPERMLA_HOST_FLAGS  further compiler flags for CPU kernels, such as -DHYPERMLA_TILE_DEBUG
#pragma once

#include <filesystem>
#include <memory>

#include "hypermla/compile/compiler.h"
#include "hypermla/device/device.h"
#include "hypermla/plan/configure.h"
#include "hypermla/profile/profilers.h"
#include "hypermla/roofline/device_spec.h"

namespace hypermla {

struct Environment {
  std::filesystem::path root;
  std::filesystem::path own_kernels;  // of the user, beside kernel_root(); empty: none
  std::filesystem::path cache;
  Toolchain toolchain;
  std::vector<std::string> host_flags;
  ProfileTools profile_tools;

  // Throws Error when the kernels' sources or the program that CXX names are not found, or when another user may write
  // them, the CUDA toolkit, the cache or the user's own kernels.
  static Environment detect();

  std::filesystem::path kernel_root() const { return root / "kernels"; }
  std::filesystem::path history_root() const { return cache / "kernel-autotune"; }
  std::filesystem::path measured_devices() const { return cache / "devices.json"; }
  // The versions in own_kernels whose plans are not part of this program, by their directories.
  std::vector<std::string> unbuilt_kernels() const;
  // Whether a version lies in own_kernels.
  bool is_own(const KernelEntry& entry) const;
  // Where `hypermla verify` records a version: with the results of the checkout, or beside kernels of the user's own.
  std::filesystem::path record_of(const KernelEntry& entry) const;
  // What holds kernels/ with a version, and docs/log/ with its log: the checkout, or the user's own project.
  std::filesystem::path project_of(const KernelEntry& entry) const;
  CompilerConfig compiler_config() const;
  DeviceTable devices() const;
};

// The roofline of a device: its own entry; else, for a CPU, the entry "CPU" with the number of its cores; else a guess
// for an unknown GPU, enough to order kernels by: the peaks of a known one of its architecture, by its multiprocessors.
// What an entry leaves out, as one that `hypermla device --measure` added, the device says or, of peaks, that guess.
DeviceSpec spec_for(const DeviceTable& table, const Device& device);

// What plans for a present device are made for; and for an entry of the table by its name, whether the device is here
// or not.
PlannedDevice planned_device(const DeviceTable& table, const Device& present);
PlannedDevice planned_device(const DeviceTable& table, const std::string& name);

}  // namespace hypermla
