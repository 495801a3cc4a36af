// A cubin is an ELF file with one .text.<function>, one .nv.shared.<function> and, in .nv.info, a list of attributes
// {format u8, attribute u8, size u16, payload}. Numbers seen in cubins of CUDA 12 and 13 and documented by `cuobjdump
// -elf`.
#include <elf.h>

#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hypermla/base/error.h"
#include "hypermla/compile/backends.h"

namespace hypermla {
namespace {

constexpr unsigned char kAttributeFrameSize = 0x11;
constexpr unsigned char kAttributeRegisterCount = 0x2f;
// One for each parameter of a kernel: {index u32, position u16, offset u16, size}. The size is the upper 14 bits of a
// u32, or, in the newer attribute, a u16.
constexpr unsigned char kAttributeParameter = 0x17, kAttributeParameter2 = 0x45;
constexpr const char* kAllocation = "__cuda_syscall_aligned_malloc";  // the driver's function
constexpr std::string_view kArguments = ".nv.constant0.";             // the section of a kernel's arguments
constexpr unsigned char kFormatSized = 0x04;  // the payload follows; otherwise the u16 is the value

template <class T>
T read_at(const std::string& bytes, std::size_t offset) {
  if (offset > bytes.size() || bytes.size() - offset < sizeof(T))
    fail("the compiled kernel is cut off; delete its cache entry and compile again");
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

// Calls visit(name, header) for every section.
template <class Visit>
void for_each_section(const std::string& cubin, const Visit& visit) {
  const auto header = read_at<Elf64_Ehdr>(cubin, 0);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) fail("not a cubin: it does not start like an ELF file");
  const auto names = read_at<Elf64_Shdr>(cubin, header.e_shoff + std::size_t{header.e_shstrndx} * header.e_shentsize);
  for (unsigned i = 0; i < header.e_shnum; ++i) {
    const auto section = read_at<Elf64_Shdr>(cubin, header.e_shoff + std::size_t{i} * header.e_shentsize);
    read_at<char>(cubin, names.sh_offset + section.sh_name);
    visit(std::string(cubin.c_str() + names.sh_offset + section.sh_name), section);
  }
}

// An instruction is 16 bytes. In the lower half bits 0 to 11 are the operation, 12 to 15 the predicate and 16 to 23 the
// result; of LEPC bits from 24 on are what is added to the address of the next instruction, in bytes. In the upper half
// bits from 41 on are what the hardware is to wait for. Read from cubins of CUDA 13 for sm_90 with `cuobjdump -sass`,
// which prints CS2R Rn, SR_GLOBALTIMERLO and LEPC Rn, <address>.
constexpr std::uint64_t kPredicateAndResult = 0xfff000, kWaits = ~std::uint64_t{0} << 41;
constexpr std::uint64_t kReadSpecial64 = 0x805, kGlobalTimer = 0x15200, kLoadProgramCounter = 0x94e;

}  // namespace

bool name_code_range(std::string& cubin) {
  std::vector<std::size_t> reads;  // of the timer: bytes from the begin of the cubin
  std::size_t end = 0;             // of the function
  for_each_section(cubin, [&](const std::string& name, const Elf64_Shdr& section) {
    if (name.rfind(".text.", 0) != 0) return;
    end = section.sh_offset + section.sh_size;
    for (std::size_t at = section.sh_offset; at + 16 <= end; at += 16) {
      const auto low = read_at<std::uint64_t>(cubin, at), high = read_at<std::uint64_t>(cubin, at + 8);
      if ((low & ~kPredicateAndResult) == kReadSpecial64 && (high & ~kWaits) == kGlobalTimer) reads.push_back(at);
    }
  });
  if (reads.size() != 2) return false;
  for (const std::size_t at : reads) {
    const std::uint64_t beyond = at == reads.front() ? 0 : end - at - 16;
    const std::uint64_t instruction[2] = {
        (read_at<std::uint64_t>(cubin, at) & kPredicateAndResult) | kLoadProgramCounter | beyond << 24,
        read_at<std::uint64_t>(cubin, at + 8) & kWaits};
    std::memcpy(&cubin[at], instruction, sizeof instruction);
  }
  return true;
}

CubinResources read_cubin(const std::string& cubin) {
  CubinResources result;
  std::string kernel;  // each has a section of arguments
  for_each_section(cubin, [&](const std::string& name, const Elf64_Shdr& section) {
    if (name.rfind(".text.", 0) == 0) result.function = name.substr(6);
    if (name.rfind(kArguments, 0) == 0 && !std::exchange(kernel, name.substr(kArguments.size())).empty())
      fail(
          "there are two kernels, the second of them {}; give each a file of its own, or make those that are not asked "
          "for templates",
          kernel);
    if (name == ".strtab")
      result.allocates = cubin.substr(section.sh_offset, section.sh_size).find(kAllocation) != std::string::npos;
    if (name.rfind(".nv.shared.", 0) == 0 && name != ".nv.shared.reserved.0")
      result.shared_bytes = int(section.sh_size);
    const bool of_kernel = name.rfind(".nv.info.", 0) == 0;
    if (name != ".nv.info" && !of_kernel) return;
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
  });
  if (result.function.empty()) fail("the cubin holds no kernel; delete its cache entry and compile again");
  return result;
}

std::optional<std::vector<int>> library_parameters(const std::string& library) {
  std::optional<std::vector<int>> found;
  if (library.rfind(ELFMAG, 0) != 0) return found;
  for_each_section(library, [&](const std::string& name, const Elf64_Shdr& section) {
    if (name != "hypermla_parameters") return;
    found.emplace();
    for (std::size_t at = 0; at + sizeof(int) <= section.sh_size; at += sizeof(int))
      found->push_back(read_at<int>(library, section.sh_offset + at));
  });
  return found;
}

}  // namespace hypermla
