// What the profiles of all modes have in common. Each mode is a function of its own that starts from a frame, adds
// what it measures, and finishes it.
#pragma once

#include <optional>

#include "hypermla/base/files.h"
#include "hypermla/device/measure.h"
#include "hypermla/profile/profilers.h"

namespace hypermla {

struct Frame {
  // Kernel, problem, device, roofline, cost, clocks and stages (every kernel, then every group of kernels that run at
  // once); the directory, with params.json, tiling/ and compiled/. That is scratch until it is published.
  Frame(const ProfileRequest& request, ProfileMode mode);

  // Cold and burst; sustained where `sustained_seconds` is positive and the device is a GPU. For pipelines every
  // stage's burst as well; members of a group alone, on the whole device.
  void time(double sustained_seconds);
  // What an engine counted in a stage.
  void set_metrics(std::size_t stage, const std::map<std::string, double>& metrics, const std::string& source);
  void write(const std::filesystem::path& name, const std::string& text) const;
  // Judges and writes profile.json and report.md.
  void judge();
  // Moves all that was written to its final place. A run that ends before leaves nothing there.
  ProfileResult publish();

  const ProfileRequest& request;
  Profile profile;
  std::filesystem::path directory;  // until it is published

 private:
  std::filesystem::path wanted_, place_;  // of the scratch: wanted_ where that was there, else the directory above it
  std::optional<Scratch> scratch_;
};

// A time in rates and against the roofline.
Times times_of(const Timing& timing, const Cost& cost, double predicted_us);

// What an executable consists of, as its profile lists it: every kernel, then every group of kernels that run at once.
std::vector<Executable*> profiled_stages(Executable& executable);

ProfileResult event_profile(const ProfileRequest& request);
ProfileResult annotation_profile(const ProfileRequest& request);
ProfileResult ncu_profile(const ProfileRequest& request);
ProfileResult nsys_profile(const ProfileRequest& request);

}  // namespace hypermla
