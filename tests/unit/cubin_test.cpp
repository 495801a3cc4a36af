// The reader of compiled kernels, on ELF files made here: no compiler, no binary in the repository.
#include <elf.h>
#include <gtest/gtest.h>

#include <cstring>

#include "hypermla/compile/backends.h"
#include "hypermla/compile/compiler.h"
#include "support.h"

namespace hypermla::cubin_test {
namespace {
using testing_support::contains;
using testing_support::error_of;

struct Section {
  std::string name;
  std::string bytes;
  std::size_t size = 0;  // for sections without bytes, such as .nv.shared
};

template <class T>
std::string raw(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

// One sized attribute of .nv.info: {format 4, attribute, size 8, symbol, value}.
std::string sized(unsigned char attribute, std::uint32_t symbol, std::uint32_t value) {
  return std::string{'\x04', char(attribute), '\x08', '\0'} + raw(symbol) + raw(value);
}

// A parameter in both attributes: the size in the upper 14 bits of a u32, or as a u16.
std::string parameter(std::uint16_t position, std::uint32_t bytes) {
  return std::string{'\x04', '\x17', '\x0c', '\0'} + raw(std::uint32_t{0}) + raw(position) + raw(std::uint16_t{0}) +
         raw(std::uint32_t{bytes << 18 | 0x1f000});
}
std::string parameter2(std::uint16_t position, std::uint16_t bytes) {
  return std::string{'\x04', '\x45', '\x0c', '\0'} + raw(std::uint32_t{0}) + raw(position) + raw(std::uint16_t{0}) +
         raw(bytes) + raw(std::uint16_t{0x400});
}

std::string elf(const std::vector<Section>& sections) {
  std::string names(1, '\0'), body;
  std::vector<Elf64_Shdr> headers(1);
  std::memset(headers.data(), 0, sizeof(Elf64_Shdr));
  auto add = [&](const std::string& name, const std::string& bytes, std::size_t size) {
    Elf64_Shdr header{};
    header.sh_name = Elf64_Word(names.size());
    header.sh_offset = sizeof(Elf64_Ehdr) + body.size();
    header.sh_size = size;
    names += name + '\0';
    body += bytes;
    headers.push_back(header);
  };
  for (const Section& section : sections)
    add(section.name, section.bytes, section.bytes.empty() ? section.size : section.bytes.size());
  add(".shstrtab", "", 0);
  headers.back().sh_offset = sizeof(Elf64_Ehdr) + body.size();
  headers.back().sh_size = names.size();
  body += names;

  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_shoff = sizeof(Elf64_Ehdr) + body.size();
  header.e_shentsize = sizeof(Elf64_Shdr);
  header.e_shnum = Elf64_Half(headers.size());
  header.e_shstrndx = Elf64_Half(headers.size() - 1);
  std::string table;
  for (const Elf64_Shdr& section : headers) table += raw(section);
  return raw(header) + body + table;
}

std::string attributes() {
  return sized(0x11, 3, 96)  // frame
         + std::string{'\x03', '\x1b', '\x34', '\x12'}
         // a value in place: nothing follows, though the size field may say so
         + sized(0x23, 3, 999)   // something else
         + sized(0x2f, 3, 168);  // registers
}

std::vector<Section> kernel_sections() {
  return {{".text.flash_mla_1", "code"},
          {".nv.info", attributes()},
          {".nv.shared.reserved.0", "", 1024},
          {".nv.shared.flash_mla_1", "", 49152},
          {".nv.info.flash_mla_1", sized(0x2f, 3, 7)}};
}

// CS2R R<result>, SR_GLOBALTIMERLO as CUDA 13 has it, what to wait for included.
std::string timer(unsigned result) {
  return raw(std::uint64_t{0x7805} | std::uint64_t{result} << 16) + raw(std::uint64_t{0x000fe20000015200});
}

TEST(Cubin, TwoKernelsAreRefused) {
  const std::vector<Section> one = {{".text.one", "code"}, {".nv.constant0.one", "arguments"}};
  EXPECT_EQ(read_cubin(elf(one)).function, "one");
  std::vector<Section> two = one;
  two.push_back({".text.two", "code"});
  EXPECT_EQ(error_of([&] { read_cubin(elf(two)); }), "");  // a function that it calls
  two.push_back({".nv.constant0.two", "arguments"});
  EXPECT_TRUE(contains(error_of([&] { read_cubin(elf(two)); }), "two kernels, the second of them two; give each"));
}

TEST(Cubin, AKernelMayFindItsOwnCode) {
  const std::string other = raw(std::uint64_t{0x000000000200798f}) + raw(std::uint64_t{0x000fe20000800100}),
                    clock = raw(std::uint64_t{0x0000000000047805}) + raw(std::uint64_t{0x000fe20000015000});
  const auto of = [&](const std::string& code) { return elf({{".text.k", code}, {".nv.info", attributes()}}); };
  std::string cubin = of(other + timer(4) + clock + timer(254) + other);
  const std::string before = cubin;
  EXPECT_TRUE(name_code_range(cubin));
  // LEPC R4, <next>; LEPC R254, <next + 16>.
  const std::string first = raw(std::uint64_t{0x000000000004794e}) + raw(std::uint64_t{0x000fe20000000000}),
                    second = raw(std::uint64_t{0x0000000010fe794e}) + raw(std::uint64_t{0x000fe20000000000});
  EXPECT_EQ(cubin, of(other + first + clock + second + other));
  EXPECT_FALSE(name_code_range(cubin));
  for (const std::string& code : {other + clock, other + timer(4), timer(4) + timer(6) + timer(8)}) {
    cubin = of(code);
    EXPECT_FALSE(name_code_range(cubin));
    EXPECT_EQ(cubin, of(code));
  }
}

TEST(Cubin, ReadsTheResourcesOfItsKernel) {
  const CubinResources resources = read_cubin(elf(kernel_sections()));
  EXPECT_EQ(resources.function, "flash_mla_1");
  EXPECT_EQ(resources.registers, 168);
  EXPECT_EQ(resources.frame_bytes, 96);
  EXPECT_EQ(resources.shared_bytes, 49152);
  EXPECT_FALSE(resources.allocates);
}

TEST(Cubin, KnowsWhatTakesMemoryFromTheHeap) {
  std::vector<Section> sections = kernel_sections();
  sections.push_back({".strtab", std::string("\0free\0__cuda_syscall_aligned_malloc\0", 36)});
  EXPECT_TRUE(read_cubin(elf(sections)).allocates);
}

TEST(Cubin, ReadsTheSizesOfParametersInOrder) {
  const std::string older = parameter(2, 128) + parameter(1, 4) + parameter(0, 8);
  const std::string newer = parameter2(1, 4) + parameter2(0, 8);
  EXPECT_EQ(read_cubin(elf({{".text.k", "code"}, {".nv.info.k", older}})).parameters, (std::vector<int>{8, 4, 128}));
  EXPECT_EQ(read_cubin(elf({{".text.k", "code"}, {".nv.info.k", newer}})).parameters, (std::vector<int>{8, 4}));
}

TEST(Cubin, ArgumentsThatAreNotTheKernelsAreRefused) {
  const testing_support::TempDir dir;
  const std::string cubin = elf({{".text.k", "code"}, {".nv.info.k", parameter(0, 8) + parameter(1, 4)}});
  const CacheEntry entry =
      KernelCache(dir.path()).publish("k", {{"kernel.cubin", cubin}}, {{"artifact", "kernel.cubin"}});
  const auto said = [&](std::vector<int> arguments) {
    return error_of([&] { require_arguments({"flash", "cute/flash.cuh", "flash<1>", std::move(arguments)}, entry); });
  };
  EXPECT_EQ(said({8, 4}), "");
  EXPECT_EQ(said({}), "");  // not known
  for (const std::vector<int>& wrong : {std::vector<int>{8}, {4, 8}, {8, 4, 4}, {8, 8}})
    EXPECT_TRUE(contains(said(wrong), "flash takes 2 arguments of 8, 4 bytes, but its plan passes ")) << said(wrong);
  EXPECT_TRUE(contains(said({8}),
                       "passes 1 of 8 bytes; give the plan's Arguments the order and the types of the "
                       "parameters in cute/flash.cuh"));
}

TEST(Cubin, AKernelWithoutFrameOrSharedMemoryHasNone) {
  const CubinResources resources = read_cubin(elf({{".text.k", "code"}, {".nv.info", sized(0x2f, 0, 32)}}));
  EXPECT_EQ(resources.registers, 32);
  EXPECT_EQ(resources.frame_bytes, 0);
  EXPECT_EQ(resources.shared_bytes, 0);
}

TEST(Cubin, RefusesWhatIsNoElf) {
  EXPECT_TRUE(contains(error_of([] { read_cubin(std::string(4096, 'x')); }), "not a cubin"));
}

TEST(Cubin, RefusesAnElfWithoutKernel) {
  EXPECT_TRUE(contains(error_of([] { read_cubin(elf({{".nv.info", attributes()}})); }), "holds no kernel"));
}

// The section table comes last, so every cut loses some of it.
TEST(Cubin, NoticesEveryTruncation) {
  const std::string whole = elf(kernel_sections());
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_TRUE(contains(error_of([&] { read_cubin(whole.substr(0, size)); }), "cut off")) << size << " bytes";
  }
}

TEST(Cubin, SurvivesOffsetsBeyondTheFile) {
  for (const std::uint64_t offset : {std::uint64_t{1} << 40, ~std::uint64_t{0} - 3, ~std::uint64_t{0} - 128}) {
    std::string table = elf(kernel_sections());
    std::memcpy(table.data() + offsetof(Elf64_Ehdr, e_shoff), &offset, sizeof offset);
    EXPECT_TRUE(contains(error_of([&] { read_cubin(table); }), "cut off")) << offset;

    std::string section = elf(kernel_sections());
    Elf64_Ehdr header;
    std::memcpy(&header, section.data(), sizeof header);
    const std::size_t names = header.e_shoff + (header.e_shnum - 1) * sizeof(Elf64_Shdr);
    std::memcpy(section.data() + names + offsetof(Elf64_Shdr, sh_offset), &offset, sizeof offset);
    EXPECT_TRUE(contains(error_of([&] { read_cubin(section); }), "cut off")) << offset;
  }
}

// An attribute list that claims more than it has must neither be read past its end nor walked for ever.
TEST(Cubin, SurvivesAnAttributeThatOverrunsTheFile) {
  std::string last = sized(0x2f, 0, 32);
  last.resize(4);
  EXPECT_TRUE(contains(error_of([&] {
                         std::string bytes = elf({{".text.k", "code"}, {".nv.info", last}});
                         Elf64_Ehdr header;
                         std::memcpy(&header, bytes.data(), sizeof header);
                         const std::uint64_t size = std::uint64_t{1} << 40;
                         std::memcpy(
                             bytes.data() + header.e_shoff + 2 * sizeof(Elf64_Shdr) + offsetof(Elf64_Shdr, sh_size),
                             &size, sizeof size);
                         read_cubin(bytes);
                       }),
                       "cut off"));
}

}  // namespace
}  // namespace hypermla::cubin_test
