// Random tensors: values by seed and place alone, whatever the backend and the block.
#include <bit>

#include "tests/unit/op_test.h"

namespace kdtree::ops_test {

namespace {

class RandomFillTest : public OpTest {
 protected:
  template <class T>
  std::vector<T> draw(const RandomFill& fill, const RandomBlock& block, std::int64_t rows,
                      std::int64_t cols) {
    GuardedTensor tensor(backend(), kDTypeOf<T>, {rows, cols});
    backend().fill_random(fill, block, tensor.view());
    return tensor.template download<T>();
  }
};
KDTREE_TEST_ALL_BACKENDS(RandomFillTest);

constexpr RandomFill kBits = {.kind = RandomFill::Kind::kBits, .seed = 1234567};
constexpr RandomFill kFloats = {
    .kind = RandomFill::Kind::kBFloat16, .seed = 42, .low = -0.25F, .high = 0.75F};

// The published generator: with the seed 1234567 it begins with 6457827717110365317,
// 3203168211198807973.
TEST_P(RandomFillTest, BitsAreSplitMix64) {
  const auto got = draw<std::int32_t>(kBits, {.total_columns = 2}, 1, 2);
  EXPECT_EQ(static_cast<std::uint32_t>(got[0]), 6457827717110365317U >> 32);
  EXPECT_EQ(static_cast<std::uint32_t>(got[1]), 3203168211198807973U >> 32);
}

TEST_P(RandomFillTest, FloatsAreTheRoundedShareOfTheRange) {
  constexpr std::int64_t kRows = 33;
  constexpr std::int64_t kCols = 70;
  std::vector<float> want;
  for (std::int64_t i = 0; i < kRows * kCols; ++i) {
    const double share = static_cast<double>(random_bits(kFloats.seed, i) >> 40) * 0x1p-24;
    // Exact in double; float32 rounds the sum, bf16 rounds that.
    want.push_back(rounded_to(DType::kBFloat16, {static_cast<float>(-0.25 + share)})[0]);
  }
  const RandomBlock whole = {.total_columns = kCols};
  EXPECT_EQ(draw<float>(kFloats, whole, kRows, kCols), want);
  EXPECT_EQ(to_float(draw<BFloat16>(kFloats, whole, kRows, kCols)), want);
  double mean = 0;
  for (const float value : want) {
    EXPECT_GE(value, -0.25F);
    EXPECT_LE(value, 0.75F);
    mean += value / static_cast<double>(want.size());
  }
  // Five standard deviations of a uniform mean.
  EXPECT_NEAR(mean, 0.25, 5 * std::sqrt(1.0 / 12 / static_cast<double>(want.size())));
}

TEST_P(RandomFillTest, BlocksAreCutFromTheWhole) {
  constexpr std::int64_t kRows = 9;
  constexpr std::int64_t kCols = 40;
  const auto whole = draw<std::int32_t>(kBits, {.total_columns = kCols}, kRows, kCols);
  const auto part =
      draw<std::int32_t>(kBits, {.first_row = 3, .first_column = 8, .total_columns = kCols}, 4, 16);
  for (std::int64_t r = 0; r < 4; ++r) {
    for (std::int64_t c = 0; c < 16; ++c) {
      EXPECT_EQ(part[static_cast<std::size_t>(r * 16 + c)],
                whole[static_cast<std::size_t>((r + 3) * kCols + c + 8)]);
    }
  }
  // Far out: places beyond 2^32.
  const auto far = draw<std::int32_t>(
      kBits, {.first_row = std::int64_t{1} << 20, .total_columns = std::int64_t{1} << 13}, 1, 1);
  EXPECT_EQ(static_cast<std::uint32_t>(far[0]),
            random_bits(kBits.seed, std::int64_t{1} << 33) >> 32);
}

TEST_P(RandomFillTest, MalformedShapesThrow) {
  GuardedTensor floats(backend(), DType::kFloat32, {2, 4});
  GuardedTensor words(backend(), DType::kInt32, {2, 4});
  EXPECT_THROW(backend().fill_random(kBits, {.total_columns = 4}, floats.view()), Error);
  EXPECT_THROW(backend().fill_random(kFloats, {.total_columns = 4}, words.view()), Error);
  EXPECT_THROW(backend().fill_random(kFloats, {.total_columns = 3}, floats.view()), Error);
  EXPECT_THROW(
      backend().fill_random(kFloats, {.first_column = 1, .total_columns = 4}, floats.view()),
      Error);
  backend().fill_random(kFloats, {.total_columns = 4}, floats.view().rows(0, 0));
}

}  // namespace

}  // namespace kdtree::ops_test
