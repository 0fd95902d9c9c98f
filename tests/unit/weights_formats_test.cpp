// Number formats of stored weights, against values worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/check.h"
#include "weights/number_formats.h"

namespace kdtree {
namespace {

TEST(WeightsFormats, WidensFloat16) {
  EXPECT_EQ(float_from_float16(0x0000), 0.0F);
  EXPECT_TRUE(std::signbit(float_from_float16(0x8000)));
  EXPECT_EQ(float_from_float16(0x3c00), 1.0F);
  EXPECT_EQ(float_from_float16(0xc000), -2.0F);
  EXPECT_EQ(float_from_float16(0x7bff), 65504.0F);
  EXPECT_EQ(float_from_float16(0x0001), std::ldexp(1.0F, -24));
  EXPECT_EQ(float_from_float16(0x03ff), std::ldexp(1023.0F, -24));
  EXPECT_EQ(float_from_float16(0x0400), std::ldexp(1.0F, -14));
  EXPECT_EQ(float_from_float16(0x3555), 0.333251953125F);
  EXPECT_EQ(float_from_float16(0x7c00), std::numeric_limits<float>::infinity());
  EXPECT_EQ(float_from_float16(0xfc00), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(float_from_float16(0x7e01)));
}

TEST(WeightsFormats, WidensFloat8) {
  EXPECT_EQ(float_from_float8_e4m3(0x00), 0.0F);
  EXPECT_EQ(float_from_float8_e4m3(0x38), 1.0F);
  EXPECT_EQ(float_from_float8_e4m3(0xb8), -1.0F);
  EXPECT_EQ(float_from_float8_e4m3(0x7e), 448.0F);
  EXPECT_EQ(float_from_float8_e4m3(0x01), std::ldexp(1.0F, -9));
  EXPECT_EQ(float_from_float8_e4m3(0x08), std::ldexp(1.0F, -6));
  EXPECT_EQ(float_from_float8_e4m3(0x39), 1.125F);
  EXPECT_TRUE(std::isnan(float_from_float8_e4m3(0x7f)));
  EXPECT_TRUE(std::isnan(float_from_float8_e4m3(0xff)));
}

// The published example of compressed-tensors: 1..7, 0, -1..-8 pack into these two words.
TEST(WeightsFormats, DequantizesTheInt4Example) {
  const std::vector<std::uint32_t> words = {0x8fedcba9, 0x01234567};
  const std::vector<float> scales = {0.5F, 2.0F};
  std::vector<float> out(16);
  dequantize_int4(words, scales, 8, out);
  const std::vector<float> expected = {0.5F, 1,  1.5F, 2,  2.5F, 3,   3.5F, 0,
                                       -2,   -4, -6,   -8, -10,  -12, -14,  -16};
  EXPECT_EQ(out, expected);
}

TEST(WeightsFormats, QuantizesWithinHalfAStep) {
  std::vector<float> values(96);  // three groups of 32
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(static_cast<float>(i) * 1.7F) * (i < 32 ? 1.0F : 20.0F);
  }
  std::fill(values.begin() + 64, values.begin() + 80, 0.0F);  // a group of zeros
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Int4Matrix matrix = quantize_int4(values, 32, 16, dtype);
    ASSERT_EQ(matrix.words.size(), values.size() / 8);
    ASSERT_EQ(matrix.scales.size(), values.size() / 16);
    EXPECT_EQ(matrix.scales[4], 1.0F);
    std::vector<float> out(values.size());
    dequantize_int4(matrix.words, matrix.scales, 16, out);
    for (std::size_t i = 0; i < values.size(); ++i) {
      // The positive end is 7 steps of 7.5; a bf16 scale is off by up to 2^-8 of itself.
      const bool zero = i / 16 == 4;
      const float bound = zero ? 0.0F : matrix.scales[i / 16] * (0.5F + 8.0F / 256);
      EXPECT_LE(std::abs(out[i] - values[i]), bound) << i;
    }
  }
  EXPECT_THROW(quantize_int4(values, 32, 12, DType::kFloat32), Error);
}

TEST(WeightsFormats, RoundsToBFloat16) {
  const std::vector<float> values = {1.0F, 1.00390625F, 1.01171875F, -3.0F};
  std::vector<std::uint16_t> out(values.size());
  narrow(values, DType::kBFloat16, out.data());
  EXPECT_EQ(out, (std::vector<std::uint16_t>{0x3f80, 0x3f80, 0x3f82, 0xc040}));
  std::vector<float> back(values.size());
  widen(DType::kBFloat16, out.data(), back);
  EXPECT_EQ(back, (std::vector<float>{1.0F, 1.0F, 1.015625F, -3.0F}));
  EXPECT_THROW(widen(DType::kInt32, out.data(), back), Error);
}

}  // namespace
}  // namespace kdtree
