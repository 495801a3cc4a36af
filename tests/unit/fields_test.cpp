#include "hypermla/base/fields.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "hypermla/base/error.h"

namespace hypermla::fields_test {
namespace {

struct Sample {
  int Bm = 64;
  bool causal = false;
  float scale = 0.5f;
  DType dtype = DType::bfloat16;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "query rows of one block");
    field("causal", self.causal, "mask later tokens");
    field("scale", self.scale, "of the scores");
    field("dtype", self.dtype, "element type");
  }
};

struct Empty {
  template <class Self, class Visitor>
  static constexpr void fields(Self&, Visitor&&) {}
};

// The message of the Error that `action` throws.
template <class Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

bool mentions(const std::string& message, const std::string& what) { return message.find(what) != std::string::npos; }

TEST(Nearest, CountsInsertionsReplacementsAndSwaps) {
  const std::vector<std::string> names{"flash_attention", "flash_mla", "mla_var6_plus"};
  EXPECT_EQ(nearest("flash_atention", names), "flash_attention");
  EXPECT_EQ(nearest("flahs_mla", names), "flash_mla");
  EXPECT_EQ(nearest("mla_var5_plus", names), "mla_var6_plus");
  EXPECT_EQ(nearest("ab", {"bcb", "ba"}), "ba");  // a swap is one edit, not two
}

TEST(Nearest, PrefersANameThatHoldsTheWord) {
  const std::vector<std::string> devices = {"CPU", "NVIDIA H200", "NVIDIA GeForce RTX 5090"};
  EXPECT_EQ(nearest("H200", devices), "NVIDIA H200");
  EXPECT_EQ(nearest("rtx 5090", devices), "NVIDIA GeForce RTX 5090");
}

TEST(Nearest, TakesDashAndUnderscoreForOneLetter) { EXPECT_EQ(nearest("a-b-c-d", {"axbxcd", "a_b_c_d"}), "a_b_c_d"); }

TEST(Nearest, IsEmptyWithoutCandidatesAndTakesTheFirstOfEquals) {
  EXPECT_EQ(nearest("x", {}), "");
  EXPECT_EQ(nearest("x", {"a", "b"}), "a");
  EXPECT_EQ(nearest("", {"ab", "c"}), "c");
}

TEST(Fields, SpellTextLiteralAndType) {
  Sample sample;
  const auto fields = fields_of(sample);
  ASSERT_EQ(fields.size(), 4u);
  EXPECT_EQ(fields[0].help, "query rows of one block");
  EXPECT_EQ(fields[0].text(), "64");
  EXPECT_EQ(fields[1].text(), "false");
  EXPECT_EQ(fields[2].text(), "0.5");
  EXPECT_EQ(fields[3].text(), "bfloat16");
  EXPECT_EQ(fields[0].type_name(), "INT");
  EXPECT_EQ(fields[1].type_name(), "BOOL");
  EXPECT_EQ(fields[2].type_name(), "FLOAT");
  EXPECT_EQ(fields[3].type_name(), "DTYPE");
  EXPECT_EQ(fields_initializer(sample),
            "{.Bm = 64, .causal = false, .scale = 0.5f, .dtype = hypermla::DType::bfloat16}");
  EXPECT_EQ(fields_initializer(Empty{}), "{}");
}

TEST(Fields, FloatLiteralsAreAlwaysFloatingAndFinite) {
  Sample sample;
  const FieldRef scale = fields_of(sample)[2];
  sample.scale = 1;
  EXPECT_EQ(scale.literal(), "1.0f");
  sample.scale = -3;
  EXPECT_EQ(scale.literal(), "-3.0f");
  sample.scale = 1e20f;
  EXPECT_EQ(scale.literal(), "1e+20f");
  sample.scale = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(mentions(error_of([&] { (void)scale.literal(); }), "scale"));
}

TEST(Fields, JsonKeepsOrderAndReadsAsWritten) {
  Sample sample;
  sample.scale = 0.1f;
  EXPECT_EQ(fields_json(sample).dump(), R"({"Bm":64,"causal":false,"scale":0.1,"dtype":"bfloat16"})");
}

TEST(Fields, JsonRoundTripsExactly) {
  for (const float scale : {0.1f, 1.0f / 3.0f, 1e-38f, std::numeric_limits<float>::max(), 16777217.0f}) {
    const Sample sample{-7, true, scale, DType::float32};
    const Sample back = fields_from_json<Sample>(Json::parse(fields_json(sample).dump()));
    EXPECT_EQ(back.Bm, -7);
    EXPECT_TRUE(back.causal);
    EXPECT_EQ(back.scale, scale);
    EXPECT_EQ(back.dtype, DType::float32);
  }
}

TEST(Fields, MissingKeysKeepTheirValues) {
  const Sample back = fields_from_json<Sample>({{"causal", true}}, Sample{16, false, 2, DType::float16});
  EXPECT_EQ(back.Bm, 16);
  EXPECT_TRUE(back.causal);
  EXPECT_EQ(back.dtype, DType::float16);
}

TEST(Fields, UnknownKeyNamesTheNearest) {
  const std::string message = error_of([] { fields_from_json<Sample>({{"cuasal", true}}); });
  EXPECT_TRUE(mentions(message, "'cuasal'") && mentions(message, "'causal'")) << message;
  EXPECT_TRUE(mentions(error_of([] { fields_from_json<Sample>(Json::array({1})); }), "object"));
}

TEST(Fields, SetRefusesWhatDoesNotFitAndKeepsTheValue) {
  const std::vector<Json> wrong{
      {{"Bm", 64.5}},
      {{"Bm", true}},
      {{"Bm", "64"}},
      {{"Bm", 3000000000u}},
      {{"Bm", nullptr}},
      {{"causal", 1}},
      {{"causal", "true"}},
      {{"scale", 1e300}},
      {{"scale", "1"}},
      {{"scale", nullptr}},
      {{"dtype", "bf16"}},
      {{"dtype", 0}},
      {{"Bm", 18446744073709551615u}},
      {{"Bm", -3000000000}},
  };
  for (const Json& values : wrong) {
    Sample sample;
    const std::string name = values.begin().key();
    const std::string message = error_of([&] { from_json(fields_of(sample), values); });
    EXPECT_EQ(message.rfind(name + " cannot be", 0), 0u) << values << ": " << message;
    EXPECT_EQ(fields_json(sample), fields_json(Sample{})) << values;
  }
}

TEST(Fields, ParseReadsWhatTextWrites) {
  const Sample source{-128, true, 0.1f, DType::float16};
  Sample copy = source, target;
  auto from = fields_of(copy), to = fields_of(target);
  for (std::size_t i = 0; i < from.size(); ++i) to[i].parse(from[i].text());
  EXPECT_EQ(fields_json(target), fields_json(source));
  to[1].parse("0");
  EXPECT_FALSE(target.causal);
  to[1].parse("1");
  EXPECT_TRUE(target.causal);
}

TEST(Fields, ParseRefusesWithTheFieldAndWhatItAccepts) {
  const std::vector<std::vector<std::string>> wrong{{"", "x", "64 ", "6.5", "99999999999", "0x10"},
                                                    {"", "yes", "TRUE"},
                                                    {"", "nan", "inf", "1e99", "0.5f"},
                                                    {"", "half"}};
  const std::vector<std::string> accepted{"integer", "true or false", "finite number", "bfloat16 or float16"};
  Sample sample;
  auto fields = fields_of(sample);
  for (std::size_t i = 0; i < fields.size(); ++i) {
    for (const std::string& text : wrong[i]) {
      const std::string message = error_of([&] { fields[i].parse(text); });
      EXPECT_TRUE(mentions(message, std::string(fields[i].name)) && mentions(message, accepted[i]))
          << text << ": " << message;
    }
  }
  EXPECT_EQ(fields_json(sample), fields_json(Sample{}));
}

TEST(DTypes, NamesAndBytes) {
  for (const DType dtype : {DType::bfloat16, DType::float16, DType::float32}) {
    EXPECT_EQ(dtype_from_name(dtype_name(dtype)), dtype);
  }
  EXPECT_EQ(dtype_bytes(DType::bfloat16), 2);
  EXPECT_EQ(dtype_bytes(DType::float16), 2);
  EXPECT_EQ(dtype_bytes(DType::float32), 4);
  EXPECT_TRUE(mentions(error_of([] { dtype_from_name("fp8"); }), "bfloat16 or float16"));
  EXPECT_THROW(dtype_name(static_cast<DType>(9)), Error);
}

TEST(Fields, AnIntegerMayHaveWords) {
  Sample sample;
  FieldRef field = fields_of(sample)[0];
  field.words = {{"roofline", -2}};
  field.parse("roofline");
  EXPECT_EQ(sample.Bm, -2);
  field.parse("32");
  EXPECT_EQ(sample.Bm, 32);
  for (const char* text : {"roof", "-2"})  // which is what the word stands for, and may come to be another number
    EXPECT_TRUE(mentions(error_of([&] { field.parse(text); }), "give it an integer of 32 bits, or roofline"));
  EXPECT_EQ(sample.Bm, 32);
}

}  // namespace
}  // namespace hypermla::fields_test
