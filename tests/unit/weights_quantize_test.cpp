// Rounding to INT4 groups, against values worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "weights/quantize.h"
#include "weights_test_support.h"

namespace kdtree {
namespace {

constexpr const char* kPlace = "m: tensor \"w\"";

Int4Matrix quantize(const std::vector<float>& values, std::int64_t columns,
                    std::int64_t group_size) {
  return quantize_rows({.values = values,
                        .first_row = 0,
                        .first_column = 0,
                        .columns = columns,
                        .group_size = group_size},
                       kPlace);
}

// absmax 7.5: scale 1. Halves go to the even neighbour, the positive end is cut at 7.
TEST(WeightsQuantize, HandValues) {
  const Int4Matrix matrix = quantize({7.5F, -7.5F, 0.5F, 1.5F, 2.5F, -0.5F, -1.5F, 0}, 8, 8);
  EXPECT_EQ(matrix.scales, (std::vector<float>{1}));
  // 7, -8, 0, 2, 2, 0, -2, 0 as codes 15, 0, 8, 10, 10, 8, 6, 8 from the low end on.
  EXPECT_EQ(matrix.words, (std::vector<std::uint32_t>{0x868aa80f}));
}

// absmax / 7.5 = 1.0052 rounds to the BF16 1.0078125. The second value is 0.5007 of the one and
// 0.4993 of the other: the rounded scale divides.
TEST(WeightsQuantize, DividesByTheRoundedScale) {
  const float absmax = 7.5F * 1.0052F;
  const float value = 0.5F * 1.0065F;
  const Int4Matrix matrix = quantize({-absmax, value, 0, 0, 0, 0, 0, 0}, 8, 8);
  EXPECT_EQ(matrix.scales[0], 1.0078125F);
  EXPECT_EQ((matrix.words[0] >> 4) & 15U, 8U);
}

TEST(WeightsQuantize, ZeroGroupsHaveAUsableScale) {
  const Int4Matrix matrix = quantize(std::vector<float>(16, 0.0F), 16, 8);
  EXPECT_EQ(matrix.scales, (std::vector<float>{1, 1}));
  EXPECT_EQ(matrix.words, (std::vector<std::uint32_t>{0x88888888, 0x88888888}));
}

TEST(WeightsQuantize, AnyDivisionIntoCallsGivesTheSame) {
  std::vector<float> values(256);  // four rows of 64
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(static_cast<float>(i) * 1.7F);
  }
  const Int4Matrix whole = quantize(values, 64, 32);
  Int4Matrix joined;
  for (std::size_t row = 0; row < 4; ++row) {
    const Int4Matrix part = quantize_rows({.values = std::span(values).subspan(row * 64, 64),
                                           .first_row = static_cast<std::int64_t>(row),
                                           .first_column = 0,
                                           .columns = 64,
                                           .group_size = 32},
                                          kPlace);
    joined.words.insert(joined.words.end(), part.words.begin(), part.words.end());
    joined.scales.insert(joined.scales.end(), part.scales.begin(), part.scales.end());
  }
  EXPECT_EQ(joined.words, whole.words);
  EXPECT_EQ(joined.scales, whole.scales);
}

TEST(WeightsQuantize, RefusesWhatCannotBeQuantized) {
  std::vector<float> values(64, 1.0F);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    values[19] = bad;
    expect_input_error(
        [&] {
          quantize_rows({.values = values,
                         .first_row = 5,
                         .first_column = 32,
                         .columns = 16,
                         .group_size = 8},
                        kPlace);
        },
        {kPlace, "row 6, column 35 is", "expected a finite number"});
  }
  values[19] = 1;
  expect_input_error([&] { quantize(values, 32, 24); },
                     {kPlace, "groups of 24 do not divide its 32 columns"});
  expect_input_error([&] { quantize(values, 32, 12); },
                     {kPlace, "group size is 12, expected a positive multiple of 8"});
}

}  // namespace
}  // namespace kdtree
