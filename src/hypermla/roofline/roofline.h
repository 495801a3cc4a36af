// The roofline: a kernel takes at least the time of its arithmetic at the device's peak rate and at least the time of
// its memory traffic at the device's peak bandwidth; the model assumes that the two overlap perfectly.
// Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
#pragma once

#include <string_view>

#include "hypermla/dtype.h"
#include "hypermla/roofline/device_spec.h"

namespace hypermla {

// What an algorithm must do: arithmetic (a multiply-add counts two) and compulsory traffic, each tensor moved once.
struct Cost {
  double flops = 0;
  double bytes = 0;
  double fp8_flops = 0;  // of `flops`, those of products of e4m3, of which devices do twice as many as of 16 bits

  // FLOP per byte.
  double intensity() const { return flops / bytes; }
  // Of the peak of 16 bits: 1, or up to 2.
  double product_rate() const { return flops > 0 ? flops / (flops - fp8_flops / 2) : 1; }
  Cost& operator+=(const Cost& other) {
    flops += other.flops;
    bytes += other.bytes;
    fp8_flops += other.fp8_flops;
    return *this;
  }
  friend Cost operator+(Cost a, const Cost& b) { return a += b; }
};

enum class Bound { compute, memory };
std::string_view bound_name(Bound bound);

struct Prediction {
  double seconds = 0;  // the larger of the two below
  double compute_seconds = 0;
  double memory_seconds = 0;
  Bound bound = Bound::memory;
};

// `peak_tflops` in 10^12 FLOP/s, `peak_gbps` in 10^9 bytes/s. Throws Error unless both are positive.
Prediction predict(const Cost& cost, double peak_tflops, double peak_gbps);
Prediction predict(const Cost& cost, const DeviceSpec& spec, DType dtype);

// The intensity in FLOP per byte at which arithmetic and traffic take equally long.
double ridge(const DeviceSpec& spec, DType dtype);

}  // namespace hypermla
