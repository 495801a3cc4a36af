// A cubin is an ELF file with one .text.<function>, one .nv.shared.<function> and, in .nv.info, a list of attributes
// {format u8, attribute u8, size u16, payload}. Numbers seen in cubins of CUDA 12 and 13 and documented by `cuobjdump
// -elf`.
#include <elf.h>

#include <cstring>

#include "hypermla/base/error.h"
#include "hypermla/compile/backends.h"

namespace hypermla {
namespace {

constexpr unsigned char kAttributeFrameSize = 0x11;
constexpr unsigned char kAttributeRegisterCount = 0x2f;
// One for each parameter of a kernel: {index u32, position u16, offset u16, size}. The size is the upper 14 bits of a
// u32, or, in the newer attribute, a u16.
constexpr unsigned char kAttributeParameter = 0x17, kAttributeParameter2 = 0x45;
constexpr unsigned char kFormatSized = 0x04;  // the payload follows; otherwise the u16 is the value

template <class T>
T read_at(const std::string& bytes, std::size_t offset) {
  if (offset > bytes.size() || bytes.size() - offset < sizeof(T))
    fail("the cubin is cut off; delete its cache entry and compile again");
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

}  // namespace

CubinResources read_cubin(const std::string& cubin) {
  const auto header = read_at<Elf64_Ehdr>(cubin, 0);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) fail("not a cubin: it does not start like an ELF file");
  const auto names = read_at<Elf64_Shdr>(cubin, header.e_shoff + std::size_t{header.e_shstrndx} * header.e_shentsize);
  CubinResources result;
  for (unsigned i = 0; i < header.e_shnum; ++i) {
    const auto section = read_at<Elf64_Shdr>(cubin, header.e_shoff + std::size_t{i} * header.e_shentsize);
    read_at<char>(cubin, names.sh_offset + section.sh_name);
    const std::string name(cubin.c_str() + names.sh_offset + section.sh_name);
    if (name.rfind(".text.", 0) == 0) result.function = name.substr(6);
    if (name.rfind(".nv.shared.", 0) == 0 && name != ".nv.shared.reserved.0")
      result.shared_bytes = int(section.sh_size);
    const bool of_kernel = name.rfind(".nv.info.", 0) == 0;
    if (name != ".nv.info" && !of_kernel) continue;
    for (std::size_t at = section.sh_offset; at < section.sh_offset + section.sh_size;) {
      const auto format = read_at<unsigned char>(cubin, at);
      const auto attribute = read_at<unsigned char>(cubin, at + 1);
      const auto size = read_at<std::uint16_t>(cubin, at + 2);
      // Frame and registers are pairs {symbol index, value}; the kernel is the only function, so the symbol is not
      // needed.
      if (format == kFormatSized && size >= 8 && !of_kernel) {
        const int value = int(read_at<std::uint32_t>(cubin, at + 8));
        if (attribute == kAttributeFrameSize) result.frame_bytes = value;
        if (attribute == kAttributeRegisterCount) result.registers = value;
      }
      if (format == kFormatSized && size >= 12 && of_kernel &&
          (attribute == kAttributeParameter || attribute == kAttributeParameter2)) {
        const auto position = read_at<std::uint16_t>(cubin, at + 8);
        if (result.parameters.size() <= position) result.parameters.resize(position + 1u);
        result.parameters[position] = attribute == kAttributeParameter
                                          ? int(read_at<std::uint32_t>(cubin, at + 12) >> 18)
                                          : read_at<std::uint16_t>(cubin, at + 12);
      }
      at += 4 + (format == kFormatSized ? size : 0);
    }
  }
  if (result.function.empty()) fail("the cubin holds no kernel; delete its cache entry and compile again");
  return result;
}

}  // namespace hypermla
