// What the profiles of all modes have in common. Each mode is a function of its own that starts from a frame, adds
// what it measures, and finishes it.
#pragma once

#include "hypermla/profile/profile.h"

namespace hypermla {

struct Frame {
  // Kernel, problem, device, roofline, cost, clocks and stages (every kernel, then every group of kernels that run at once);
  // the directory, with params.json, tiling/ and compiled/.
  Frame(const ProfileRequest& request, ProfileMode mode);

  // "timing": cold and burst; sustained where `sustained_seconds` is positive and the device is a GPU. For pipelines
  // every stage's burst as well; members of a group alone, on the whole device.
  void time(double sustained_seconds);
  void write(const std::filesystem::path& name, const std::string& text) const;
  // The mode's own numbers are not to be had, for this reason.
  void give_up(const std::string& why);
  // Judges and writes profile.json and report.md.
  ProfileResult finish();

  const ProfileRequest& request;
  Json profile;
  std::filesystem::path directory;
};

ProfileResult event_profile(const ProfileRequest& request);
ProfileResult annotation_profile(const ProfileRequest& request);
ProfileResult ncu_profile(const ProfileRequest& request);
ProfileResult nsys_profile(const ProfileRequest& request);

}  // namespace hypermla
