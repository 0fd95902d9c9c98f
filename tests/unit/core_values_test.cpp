// Shapes, views, bfloat16, partitions.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/dtype.h"
#include "core/partition.h"
#include "core/tensor_view.h"

namespace kdtree {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(CoreBFloat16, RoundsToNearestTiesToEven) {
  const auto bits = [](std::uint32_t word) {
    return static_cast<std::uint32_t>(BFloat16::from_float(std::bit_cast<float>(word)).bits);
  };
  EXPECT_EQ(bits(0x3f800000), 0x3f80U);
  EXPECT_EQ(bits(0x3f808000), 0x3f80U);  // a tie, down to even
  EXPECT_EQ(bits(0x3f818000), 0x3f82U);  // a tie, up to even
  EXPECT_EQ(bits(0x3f808001), 0x3f81U);
  EXPECT_EQ(bits(0x3f807fff), 0x3f80U);
  EXPECT_EQ(bits(0xbf818000), 0xbf82U);
  EXPECT_EQ(bits(0x80000000), 0x8000U);  // -0
  EXPECT_EQ(bits(0x00000001), 0x0000U);  // the smallest denormal
  EXPECT_EQ(bits(0x3fffffff), 0x4000U);  // carries into the exponent
}

TEST(CoreBFloat16, InfinityAndNanSurvive) {
  EXPECT_EQ(BFloat16::from_float(kInfinity).to_float(), kInfinity);
  EXPECT_EQ(BFloat16::from_float(-kInfinity).to_float(), -kInfinity);
  EXPECT_EQ(BFloat16::from_float(std::numeric_limits<float>::max()).to_float(), kInfinity);
  // Also NaNs whose payload lies in the half that is cut off.
  for (const std::uint32_t word : {0x7fc00000U, 0x7f800001U, 0x7fffffffU, 0xff800001U}) {
    const BFloat16 narrow = BFloat16::from_float(std::bit_cast<float>(word));
    EXPECT_TRUE(std::isnan(narrow.to_float())) << word;
    EXPECT_EQ(narrow.bits >> 15, word >> 31) << word;
  }
}

TEST(CoreBFloat16, EveryValueGoesRound) {
  for (std::uint32_t word = 0; word < 0x10000; ++word) {
    const BFloat16 value{static_cast<std::uint16_t>(word)};
    if (!std::isnan(value.to_float())) {
      EXPECT_EQ(BFloat16::from_float(value.to_float()).bits, value.bits);
    }
  }
}

TEST(CoreDType, SizesAndNames) {
  EXPECT_EQ(dtype_bytes(DType::kFloat32), 4);
  EXPECT_EQ(dtype_bytes(DType::kBFloat16), 2);
  EXPECT_EQ(dtype_bytes(DType::kFloat8E4M3), 1);
  EXPECT_EQ(dtype_bytes(DType::kInt64), 8);
  EXPECT_EQ(dtype_name(DType::kFloat8E4M3), "F8_E4M3");
  EXPECT_EQ(dtype_name(DType::kInt32), "I32");
}

TEST(CoreShape, CountsElements) {
  EXPECT_EQ(Shape{}.num_elements(), 1);
  EXPECT_EQ((Shape{3, 4, 5}).num_elements(), 60);
  EXPECT_EQ((Shape{3, 4, 5}).row_elements(), 20);
  EXPECT_EQ((Shape{7}).row_elements(), 1);
  EXPECT_EQ((Shape{0, 4}).num_elements(), 0);
  EXPECT_EQ((Shape{2, 3}).to_string(), "[2, 3]");
  EXPECT_EQ(Shape{}.to_string(), "[]");
  EXPECT_NE((Shape{2, 1}), Shape{2});
  EXPECT_THROW((Shape{1, 2, 3, 4, 5}), Error);
  EXPECT_THROW((Shape{2, 3})[2], Error);
}

class CoreTensorView : public testing::Test {
 protected:
  CoreTensorView() { std::iota(values_.begin(), values_.end(), 0.0F); }
  std::array<float, 24> values_{};
  TensorView view_{values_.data(), DType::kFloat32, Shape{4, 6}};
};

TEST_F(CoreTensorView, RowsAndColumns) {
  const TensorView rows = view_.rows(1, 2);
  EXPECT_EQ(rows.shape(), (Shape{2, 6}));
  EXPECT_TRUE(rows.contiguous());
  EXPECT_EQ(rows.span<float>()[0], 6);
  const TensorView columns = rows.columns(2, 3);
  EXPECT_EQ(columns.shape(), (Shape{2, 3}));
  EXPECT_FALSE(columns.contiguous());
  EXPECT_EQ(columns.row<float>(1)[0], 14);
  EXPECT_THROW(columns.span<float>(), Error);
  EXPECT_THROW(columns.reshape(Shape{6}), Error);
  EXPECT_EQ(columns.rows(1, 1).row<float>(0)[2], 16);
}

TEST_F(CoreTensorView, RangesOutsideAreErrors) {
  EXPECT_NO_THROW(view_.rows(4, 0));
  EXPECT_THROW(view_.rows(3, 2), Error);
  EXPECT_THROW(view_.rows(-1, 1), Error);
  EXPECT_THROW(view_.rows(1, -1), Error);
  EXPECT_THROW(view_.columns(4, 3), Error);
  EXPECT_THROW(view_.reshape(Shape{24}).columns(0, 1), Error);
  EXPECT_THROW(view_.reshape(Shape{5, 5}), Error);
  EXPECT_THROW(TensorView(values_.data(), DType::kFloat32, Shape{2, 6}, 5), Error);
}

TEST_F(CoreTensorView, ReshapeKeepsTheElements) {
  const ConstTensorView cube = view_.reshape(Shape{2, 3, 4});
  EXPECT_EQ(cube.row<float>(1)[0], 12);
  EXPECT_EQ(cube.bytes(), 96);
  EXPECT_EQ(cube.rows(1, 1).shape(), (Shape{1, 3, 4}));
}

TEST_F(CoreTensorView, TheElementTypeMustMatch) {
  EXPECT_THROW(view_.data<std::int32_t>(), Error);
  EXPECT_NO_THROW(expect_tensor("x", view_, DType::kFloat32, Shape{4, 6}));
  EXPECT_THROW(expect_tensor("x", view_, DType::kFloat32, Shape{6, 4}), Error);
  try {
    expect_tensor("delta", view_, DType::kInt32, Shape{4, 6});
    FAIL() << "no error";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("delta must be I32 [4, 6], got F32 [4, 6]"), std::string::npos) << text;
  }
  EXPECT_TRUE(TensorView().empty());
  EXPECT_EQ(TensorView(nullptr, DType::kFloat32, Shape{3, 2}).rows(1, 1).raw(), nullptr);
}

TEST(CorePartition, PartsCoverEverythingInOrder) {
  for (const std::int64_t total : {0, 1, 3, 7, 64, 129}) {
    for (const std::int64_t parts : {1, 2, 3, 4, 8}) {
      for (const std::int64_t unit : {1, 8, 32}) {
        std::int64_t next = 0;
        std::int64_t largest = 0;
        std::int64_t smallest = total;
        for (std::int64_t index = 0; index < parts; ++index) {
          const Range range = partition(total, parts, index, unit);
          EXPECT_EQ(range.begin, next);
          EXPECT_TRUE(range.begin % unit == 0 || range.size() == 0);
          next = range.end;
          largest = std::max(largest, range.size());
          smallest = std::min(smallest, range.size());
        }
        EXPECT_EQ(next, total) << parts << " " << unit;
        EXPECT_LE(largest - smallest, unit + unit - 1);
      }
    }
  }
}

TEST(CorePartition, TheRemainderGoesToTheLowParts) {
  EXPECT_EQ(partition(7, 3, 0), (Range{0, 3}));
  EXPECT_EQ(partition(7, 3, 1), (Range{3, 5}));
  EXPECT_EQ(partition(7, 3, 2), (Range{5, 7}));
  EXPECT_EQ(partition(2, 4, 3), (Range{2, 2}));
  EXPECT_EQ(partition(20, 2, 0, 8), (Range{0, 16}));
  EXPECT_EQ(partition(20, 2, 1, 8), (Range{16, 20}));
  EXPECT_TRUE((Range{2, 4}).contains(3));
  EXPECT_FALSE((Range{2, 4}).contains(4));
}

}  // namespace

}  // namespace kdtree
