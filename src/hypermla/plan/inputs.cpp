#include "hypermla/plan/inputs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

namespace hypermla {
namespace {

constexpr std::int64_t kPeriod = 1048573;  // the largest prime below 2^20

std::vector<char> random_elements(DType dtype, std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 bits(seed);
  std::normal_distribution<float> normal;
  std::vector<char> bytes(std::size_t(count) * dtype_bytes(dtype));
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = normal(bits);
    if (dtype == DType::float32) {
      std::memcpy(&bytes[i * 4], &value, 4);
    } else {
      const std::uint16_t half = to_half_bits(value, dtype);
      std::memcpy(&bytes[i * 2], &half, 2);
    }
  }
  return bytes;
}

// Repeats `period`, rotated by `offset` elements.
void fill_periodic(Device& device, const Tensor& tensor, const std::vector<char>& period, std::size_t offset) {
  char* data = static_cast<char*>(tensor.data);
  const std::size_t first = std::min(period.size() - offset, tensor.bytes());
  device.copy_to_device(data, period.data() + offset, first);
  const std::size_t second = std::min(offset, tensor.bytes() - first);
  if (second) device.copy_to_device(data + first, period.data(), second);
  for (std::size_t done = first + second; done < tensor.bytes();) {
    const std::size_t bytes = std::min(done, tensor.bytes() - done);
    device.copy(data + done, data, bytes);  // `done` is a multiple of the period: it repeats
    done += bytes;
  }
}

// Rows are scaled by 1 for the first to 16 for the last.
void scale_rows(Device& device, const Tensor& tensor, const InputRules::Growing& growing) {
  std::vector<std::uint16_t> elements(tensor.elements());
  device.copy_to_host(elements.data(), tensor.data, tensor.bytes());
  for (std::size_t i = 0; i < elements.size(); ++i) {
    const int row = int(i / growing.columns % growing.rows);
    const float factor = 1 + 15 * float(row) / float(growing.rows);
    elements[i] = to_half_bits(factor * from_half_bits(elements[i], tensor.dtype), tensor.dtype);
  }
  device.copy_to_device(tensor.data, elements.data(), tensor.bytes());
}

}  // namespace

std::uint16_t to_half_bits(float value, DType dtype) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if (dtype == DType::bfloat16) {
    if (std::isnan(value)) return std::uint16_t((bits >> 16) | 0x40);
    return std::uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  const std::uint16_t sign = std::uint16_t((bits >> 16) & 0x8000);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude < 0x1p-14f) return sign | std::uint16_t(std::nearbyint(magnitude * 0x1p24f));
  const std::uint32_t shifted = std::bit_cast<std::uint32_t>(magnitude) - (std::uint32_t{112} << 23);
  return sign | std::uint16_t((shifted + 0xfff + ((shifted >> 13) & 1)) >> 13);
}

float from_half_bits(std::uint16_t bits, DType dtype) {
  if (dtype == DType::bfloat16) return std::bit_cast<float>(std::uint32_t{bits} << 16);
  const std::uint32_t sign = std::uint32_t(bits & 0x8000) << 16;
  const std::uint32_t exponent = (bits >> 10) & 31, mantissa = bits & 0x3ff;
  if (exponent == 0) return std::copysign(float(mantissa) * 0x1p-24f, std::bit_cast<float>(sign));
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

std::vector<float> read_floats(Device& device, const Tensor& tensor, std::int64_t first, std::int64_t count) {
  std::vector<float> values(count);
  if (tensor.dtype == DType::float32) {
    device.copy_to_host(values.data(), static_cast<const float*>(tensor.data) + first, count * 4);
    return values;
  }
  if (tensor.dtype == DType::int32) {
    std::vector<std::int32_t> integers(count);
    device.copy_to_host(integers.data(), static_cast<const std::int32_t*>(tensor.data) + first, count * 4);
    std::copy(integers.begin(), integers.end(), values.begin());
    return values;
  }
  std::vector<std::uint16_t> halves(count);
  device.copy_to_host(halves.data(), static_cast<const std::uint16_t*>(tensor.data) + first, count * 2);
  for (std::int64_t i = 0; i < count; ++i) values[i] = from_half_bits(halves[i], tensor.dtype);
  return values;
}

void require_memory(const KernelPlan& plan, const DeviceInfo& info) {
  const double bytes = tensor_bytes(plan);
  if (!(bytes < double(info.memory_bytes)))
    fail("the tensors need {:.1f} GB, but this device has {:.1f} GB; choose a smaller b, h or t", bytes * 1e-9,
         info.memory_bytes * 1e-9);
}

AllocatedTensors::AllocatedTensors(std::vector<TensorSpec> specs, std::shared_ptr<Device> device, std::uint64_t seed,
                                   const InputRules& rules, bool growing)
    : device_(std::move(device)), specs_(std::move(specs)) {
  for (const TensorSpec& spec : specs_) {
    Tensor tensor{nullptr, spec.dtype, spec.shape};
    buffers_.emplace_back(device_, tensor.bytes());
    tensor.data = buffers_.back().data();
    tensors_[spec.name] = tensor;
  }
  fill(seed, rules, growing);
}

void AllocatedTensors::fill(std::uint64_t seed, const InputRules& rules, bool growing) {
  // One period of numbers per type; every tensor starts somewhere else in it.
  std::map<DType, std::vector<char>> periods;
  std::mt19937_64 random(seed);
  for (const TensorSpec& spec : specs_) {
    if (spec.role != Role::input) continue;
    const Tensor& tensor = tensors_.at(spec.name);
    if (spec.dtype == DType::int32) {
      const auto values = rules.integers.find(spec.name);
      if (values == rules.integers.end() || std::int64_t(values->second.size()) != tensor.elements())
        fail("the input rules of this plan do not give the {} values of {}", tensor.elements(), spec.name);
      device_->copy_to_device(tensor.data, values->second.data(), tensor.bytes());
      continue;
    }
    if (const auto bytes = rules.repeated.find(spec.name); bytes != rules.repeated.end()) {
      fill_periodic(*device_, tensor, bytes->second, 0);
      continue;
    }
    std::vector<char>& period = periods[spec.dtype];
    if (period.empty()) period = random_elements(spec.dtype, kPeriod, seed);
    fill_periodic(*device_, tensor, period, random() % kPeriod * dtype_bytes(spec.dtype));
  }
  if (growing && rules.growing) scale_rows(*device_, tensors_.at(rules.growing->tensor), *rules.growing);
  for (const auto& [name, ranges] : rules.unread)
    for (const auto& [first, count] : ranges) {
      const Tensor& tensor = tensors_.at(name);
      const std::size_t width = tensor.bytes() / tensor.elements();
      device_->fill(static_cast<char*>(tensor.data) + first * width, 0xff, count * width);
    }
  for (const auto& [name, ranges] : rules.minus_infinity)
    for (const auto& [first, count] : ranges) {
      const std::vector<float> values(count, -std::numeric_limits<float>::infinity());
      device_->copy_to_device(static_cast<float*>(tensors_.at(name).data) + first, values.data(), count * 4);
    }
  poison();
}

void AllocatedTensors::poison() {
  for (const TensorSpec& spec : specs_)
    if (spec.role != Role::input) device_->fill(tensors_[spec.name].data, 0xff, tensors_[spec.name].bytes());
}

InputReader AllocatedTensors::reader() const {
  return [this](const std::string& name, std::int64_t first, std::int64_t count) {
    return read_floats(*device_, tensors_.at(name), first, count);
  };
}

}  // namespace hypermla
