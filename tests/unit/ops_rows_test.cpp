// Ops on whole rows: embed, gather_rows, add_rows, add, swiglu, rms_norm.
#include "tests/unit/op_weights.h"

namespace kdtree::ops_test {
namespace {

class EmbedTest : public OpTest {};
KDTREE_TEST_ALL_BACKENDS(EmbedTest);

TEST_P(EmbedTest, CopiesRowsAndZeroesForeignOnes) {
  Random random(1);
  for (const WeightFormat format : {WeightFormat::kFloat32, WeightFormat::kBFloat16}) {
    for (const std::int64_t cols : {1, 7, 40}) {
      for (const std::int64_t first_row : {0, 5}) {
        const RandomWeight table(backend(), {format}, 6, cols, random);
        const std::vector<std::int32_t> ids = {0, 5, 10, 11, 4, 3, 0, 163839};
        auto token_ids = make_indices(backend(), ids);
        const auto rows = static_cast<std::int64_t>(ids.size());
        auto out = output({rows, cols}, cols + 3);
        backend().embed(table.view(), first_row, token_ids.view(), out.view());
        std::vector<float> want;
        for (const std::int32_t id : ids) {
          for (std::int64_t c = 0; c < cols; ++c) {
            const bool here = id >= first_row && id < first_row + 6;
            want.push_back(here ? static_cast<float>(table.at(id - first_row, c)) : 0.0F);
          }
        }
        expect_same_bits(read_floats(out), rounded_to(activation(), want), "embed");
      }
    }
  }
}

TEST_P(EmbedTest, AnyNumberOfRows) {
  Random random(11);
  constexpr std::int64_t kCols = 24;
  const RandomWeight table(backend(), {WeightFormat::kBFloat16}, 300, kCols, random);
  for (const std::int64_t rows : kRowCounts) {
    const auto ids = random.integers(rows, 400);  // some of other ranks
    auto token_ids = make_indices(backend(), ids);
    auto out = output({rows, kCols});
    backend().embed(table.view(), 0, token_ids.view(), out.view());
    std::vector<float> want;
    for (const std::int32_t id : ids) {
      for (std::int64_t c = 0; c < kCols; ++c) {
        want.push_back(id < 300 ? static_cast<float>(table.at(id, c)) : 0.0F);
      }
    }
    expect_same_bits(read_floats(out), want, std::to_string(rows) + " rows");
  }
}

TEST_P(EmbedTest, EmptyTableAndNoRows) {
  Random random(2);
  const RandomWeight empty(backend(), {WeightFormat::kFloat32}, 0, 4, random);
  auto token_ids = make_indices(backend(), {0, 1});
  auto out = output({2, 4});
  backend().embed(empty.view(), 0, token_ids.view(), out.view());
  EXPECT_EQ(read_floats(out), std::vector<float>(8, 0.0F));
  auto no_ids = make_indices(backend(), {});
  auto nothing = output({0, 4});
  backend().embed(empty.view(), 0, no_ids.view(), nothing.view());
  EXPECT_TRUE(read_floats(nothing).empty());
}

TEST_P(EmbedTest, MalformedShapesThrow) {
  Random random(3);
  const RandomWeight table(backend(), {WeightFormat::kFloat32}, 3, 4, random);
  auto token_ids = make_indices(backend(), {0, 1});
  auto narrow = output({2, 3});
  EXPECT_THROW(backend().embed(table.view(), 0, token_ids.view(), narrow.view()), Error);
  auto tall = output({3, 4});
  EXPECT_THROW(backend().embed(table.view(), 0, token_ids.view(), tall.view()), Error);
}

class GatherRowsTest : public OpTest {};
KDTREE_TEST_ALL_BACKENDS(GatherRowsTest);

TEST_P(GatherRowsTest, CopiesStridedRows) {
  Random random(4);
  for (const std::int64_t cols : {1, 5, 16, 33}) {
    const auto values = activations(random, 9 * cols);
    auto source = input({9, cols}, values, cols + 2);
    const std::vector<std::int32_t> from = {0, 8, 8, 3, 0, 7};
    auto indices = make_indices(backend(), from);
    auto out = output({6, cols}, cols + 1);
    backend().gather_rows(source.view(), indices.view(), out.view());
    expect_same_bits(read_floats(out), choose_rows(values, {from.begin(), from.end()}, cols),
                     "gather_rows");
  }
  auto source = input({2, 3}, activations(random, 6));
  auto indices = make_indices(backend(), {});
  auto out = output({0, 3});
  backend().gather_rows(source.view(), indices.view(), out.view());
  auto narrow = output({0, 2});
  EXPECT_THROW(backend().gather_rows(source.view(), indices.view(), narrow.view()), Error);
}

TEST_P(GatherRowsTest, AnyNumberOfRows) {
  Random random(12);
  constexpr std::int64_t kCols = 19;
  const auto values = activations(random, 100 * kCols);
  auto source = input({100, kCols}, values);
  for (const std::int64_t rows : kRowCounts) {
    const auto from = random.integers(rows, 100);
    auto indices = make_indices(backend(), from);
    auto out = output({rows, kCols}, kCols + 1);
    backend().gather_rows(source.view(), indices.view(), out.view());
    expect_same_bits(read_floats(out), choose_rows(values, {from.begin(), from.end()}, kCols),
                     std::to_string(rows) + " rows");
  }
}

TEST_P(GatherRowsTest, CopiesRowsOfAnyType) {
  auto indices = make_indices(backend(), {2, 0, 2});
  auto integers = make_tensor(backend(), {3, 2}, std::vector<std::int32_t>{1, 2, 3, 4, 5, 6});
  GuardedTensor some_integers(backend(), DType::kInt32, {3, 2}, 5);
  backend().gather_rows(integers.view(), indices.view(), some_integers.view());
  EXPECT_EQ(some_integers.download<std::int32_t>(), (std::vector<std::int32_t>{5, 6, 1, 2, 5, 6}));
  auto bytes = make_tensor(backend(), {3, 1}, std::vector<std::uint8_t>{7, 8, 9});
  GuardedTensor some_bytes(backend(), DType::kUInt8, {3, 1});
  backend().gather_rows(bytes.view(), indices.view(), some_bytes.view());
  EXPECT_EQ(some_bytes.download<std::uint8_t>(), (std::vector<std::uint8_t>{9, 7, 9}));
  auto wide = make_tensor(backend(), {3, 2}, std::vector<std::int64_t>{1, 2, 3, 4, 5, -6});
  GuardedTensor some_wide(backend(), DType::kInt64, {3, 2});
  backend().gather_rows(wide.view(), indices.view(), some_wide.view());
  EXPECT_EQ(some_wide.download<std::int64_t>(), (std::vector<std::int64_t>{5, -6, 1, 2, 5, -6}));
  EXPECT_THROW(backend().gather_rows(wide.view(), indices.view(), some_integers.view()), Error);
}

class AddRowsTest : public OpTest {};
KDTREE_TEST_ALL_BACKENDS(AddRowsTest);

TEST_P(AddRowsTest, AddsInOrderToTheNamedRows) {
  Random random(5);
  for (const std::int64_t cols : {1, 6, 130}) {
    const std::vector<std::int32_t> to = {2, 0, 2, -1, 2, 4};  // -1: nowhere
    const auto initial = activations(random, 5 * cols);
    // Large and small values: another order of the additions would show.
    auto deltas = activations(random, 6 * cols, -1e4, 1e4);
    for (std::int64_t c = 0; c < cols; ++c) {
      deltas[static_cast<std::size_t>(2 * cols + c)] = -deltas[static_cast<std::size_t>(c)];
    }
    auto source = input({6, cols}, deltas, cols + 4);
    auto target = input({5, cols}, initial, cols + 2);
    auto indices = make_indices(backend(), to);
    backend().add_rows(source.view(), indices.view(), target.view());
    std::vector<float> want = initial;
    for (std::size_t i = 0; i < to.size(); ++i) {
      for (std::int64_t c = 0; c < cols && to[i] >= 0; ++c) {
        float& sum = want[static_cast<std::size_t>(to[i] * cols + c)];
        sum = rounded_to(
            activation(),
            {sum + deltas[i * static_cast<std::size_t>(cols) + static_cast<std::size_t>(c)]})[0];
      }
    }
    expect_same_bits(read_floats(target), want, "add_rows");
  }
}

TEST_P(AddRowsTest, AnyNumberOfRows) {
  Random random(13);
  constexpr std::int64_t kCols = 11;
  constexpr std::int64_t kTargets = 70;
  for (const std::int64_t rows : kRowCounts) {
    const auto to = random.integers(rows, kTargets);
    const auto deltas = activations(random, rows * kCols);
    auto want = activations(random, kTargets * kCols);
    auto source = input({rows, kCols}, deltas);
    auto target = input({kTargets, kCols}, want);
    auto indices = make_indices(backend(), to);
    backend().add_rows(source.view(), indices.view(), target.view());
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t c = 0; c < kCols; ++c) {
        float& sum = want[static_cast<std::size_t>(to[static_cast<std::size_t>(i)] * kCols + c)];
        sum = rounded_to(activation(), {sum + deltas[static_cast<std::size_t>(i * kCols + c)]})[0];
      }
    }
    expect_same_bits(read_floats(target), want, std::to_string(rows) + " rows");
  }
}

class AddTest : public OpTest {};
KDTREE_TEST_ALL_BACKENDS(AddTest);

TEST_P(AddTest, AddsOnceRounded) {
  Random random(6);
  std::vector<std::int64_t> row_counts(std::begin(kRowCounts), std::end(kRowCounts));
  row_counts.push_back(0);
  for (const std::int64_t rows : row_counts) {
    for (const std::int64_t cols : {1, 7, 64, 1001}) {
      const auto a = activations(random, rows * cols);
      const auto b = activations(random, rows * cols);
      auto x = input({rows, cols}, a, cols + 5);
      auto delta = input({rows, cols}, b, cols + 3);
      backend().add(x.view(), delta.view());
      std::vector<float> want(a.size());
      std::transform(a.begin(), a.end(), b.begin(), want.begin(), std::plus<>());
      expect_same_bits(read_floats(x), rounded_to(activation(), want), "add");
    }
  }
  auto x = input({2, 3}, activations(random, 6));
  auto delta = input({2, 4}, activations(random, 8));
  EXPECT_THROW(backend().add(x.view(), delta.view()), Error);
}

class SwigluTest : public OpTest {
 protected:
  // exp with at most 2 u, then 1 + e, the quotient and the product with one rounding each: 5 u, and
  // second order.
  Expected expect_swiglu(const std::vector<float>& gate, const std::vector<float>& up) const {
    Expected want;
    for (std::size_t i = 0; i < gate.size(); ++i) {
      const double value = gate[i] / (1 + std::exp(-static_cast<double>(gate[i]))) * up[i];
      want.add(value, 5.01 * kRound * std::abs(value) + store_error(value));
    }
    return want;
  }
};
KDTREE_TEST_ALL_BACKENDS(SwigluTest);

TEST_P(SwigluTest, MatchesDoublePrecision) {
  Random random(7);
  for (const std::int64_t rows : {0, 1, 5}) {
    for (const std::int64_t cols : {1, 9, 128}) {
      const auto gates = activations(random, rows * cols, -20, 20);
      const auto ups = activations(random, rows * cols, -3, 3);
      auto gate = input({rows, cols}, gates, cols + 1);
      auto up = input({rows, cols}, ups, cols + 2);
      auto y = output({rows, cols}, cols + 3);
      backend().swiglu(gate.view(), up.view(), y.view());
      expect_within(read_floats(y), expect_swiglu(gates, ups), "swiglu");
      backend().swiglu(gate.view(), up.view(), gate.view());  // in place
      expect_same_bits(read_floats(gate), read_floats(y), "swiglu in place");
    }
  }
}

TEST_P(SwigluTest, RowsOfAnyCall) {
  Random random(14);
  constexpr std::int64_t kCols = 257;
  const auto gates = activations(random, kMostRows * kCols, -20, 20);
  const auto ups = activations(random, kMostRows * kCols, -3, 3);
  const auto got =
      expect_rows_of_any_call<float>([&](Backend& other, const std::vector<std::int64_t>& rows) {
        const auto count = static_cast<std::int64_t>(rows.size());
        const auto part = [&](const std::vector<float>& values) {
          return make_floats(other, activation(), {count, kCols}, choose_rows(values, rows, kCols));
        };
        auto gate = part(gates);
        auto up = part(ups);
        GuardedTensor y(other, activation(), {count, kCols});
        other.swiglu(gate.view(), up.view(), y.view());
        return read_floats(y);
      });
  expect_within(got, expect_swiglu(gates, ups), "swiglu");
}

TEST_P(SwigluTest, ExtremeGates) {
  auto gate = input({1, 4}, {-1e30F, 1e30F, 0.0F, -100.0F});
  auto up = input({1, 4}, {1.0F, 1.0F, 1.0F, 1.0F});
  auto y = output({1, 4});
  backend().swiglu(gate.view(), up.view(), y.view());
  const auto got = read_floats(y);
  EXPECT_EQ(got[0], 0.0F);
  EXPECT_EQ(got[1], rounded_to(activation(), {1e30F})[0]);
  EXPECT_EQ(got[2], 0.0F);
  EXPECT_NEAR(got[3], 0.0F, 1e-40);
}

class RmsNormTest : public OpTest {
 protected:
  // The n squares and their sum carry at most n roundings, the quotient by n and the sum with eps
  // one each; the root halves that and adds one; the reciprocal and the two products add three: (n
  // + 2) / 2 + 4 roundings, and second order.
  Expected expect_norm(const std::vector<float>& x, const std::vector<float>& weight,
                       double eps) const {
    const std::size_t cols = weight.size();
    Expected want;
    for (std::size_t r = 0; r < x.size() / cols; ++r) {
      double sum = 0;
      for (std::size_t c = 0; c < cols; ++c) {
        sum += static_cast<double>(x[r * cols + c]) * x[r * cols + c];
      }
      const double scale = 1 / std::sqrt(sum / static_cast<double>(cols) + eps);
      for (std::size_t c = 0; c < cols; ++c) {
        const double value = x[r * cols + c] * scale * weight[c];
        const double roundings = (static_cast<double>(cols) + 2) / 2 + 4;
        want.add(value, 1.01 * roundings * kRound * std::abs(value) + store_error(value));
      }
    }
    return want;
  }
};
KDTREE_TEST_ALL_BACKENDS(RmsNormTest);

TEST_P(RmsNormTest, MatchesDoublePrecision) {
  Random random(8);
  for (const float eps : {1e-6F, 1e-5F, 0.5F}) {
    for (const std::int64_t rows : {0, 1, 4}) {
      for (const std::int64_t cols : {1, 7, 64, 1537}) {
        const auto values = activations(random, rows * cols, -2, 2);
        const auto weights = random.floats(cols, 0.5, 1.5);
        auto x = input({rows, cols}, values, cols + 3);
        auto weight = make_tensor(backend(), {cols}, weights);
        auto y = output({rows, cols}, cols + 1);
        backend().rms_norm(x.view(), weight.view(), eps, y.view());
        expect_within(read_floats(y), expect_norm(values, weights, eps), "rms_norm");
        backend().rms_norm(x.view(), weight.view(), eps, x.view());  // in place
        expect_same_bits(read_floats(x), read_floats(y), "rms_norm in place");
      }
    }
  }
}

// Where the mean square is far below eps, a wrong place of eps is a large error.
TEST_P(RmsNormTest, EpsIsAddedToTheMean) {
  const std::vector<float> values = rounded_to(activation(), std::vector<float>(16, 1e-4F));
  const std::vector<float> weights(16, 1.0F);
  auto x = input({1, 16}, values);
  auto weight = make_tensor(backend(), {16}, weights);
  auto y = output({1, 16});
  backend().rms_norm(x.view(), weight.view(), 1e-6F, y.view());
  expect_within(read_floats(y), expect_norm(values, weights, 1e-6F), "rms_norm");
}

TEST_P(RmsNormTest, RowsAreIndependent) {
  Random random(9);
  constexpr std::int64_t kRows = 40;
  constexpr std::int64_t kCols = 7001;
  const auto values = activations(random, kRows * kCols);
  const auto weights = random.floats(kCols);
  expect_row_independence<float>(kRows, [&](Backend& other, const std::vector<std::int64_t>& rows) {
    const auto count = static_cast<std::int64_t>(rows.size());
    auto x = make_floats(other, activation(), {count, kCols}, choose_rows(values, rows, kCols));
    auto weight = make_tensor(other, {kCols}, weights);
    GuardedTensor y(other, activation(), {count, kCols});
    other.rms_norm(x.view(), weight.view(), 1e-6F, y.view());
    return read_floats(y);
  });
}

TEST_P(RmsNormTest, RowsOfAnyCall) {
  Random random(15);
  for (const std::int64_t cols : {64, 1537}) {
    const auto values = activations(random, kMostRows * cols, -2, 2);
    const auto weights = random.floats(cols, 0.5, 1.5);
    const auto got =
        expect_rows_of_any_call<float>([&](Backend& other, const std::vector<std::int64_t>& rows) {
          const auto count = static_cast<std::int64_t>(rows.size());
          auto x = make_floats(other, activation(), {count, cols}, choose_rows(values, rows, cols));
          auto weight = make_tensor(other, {cols}, weights);
          GuardedTensor y(other, activation(), {count, cols});
          other.rms_norm(x.view(), weight.view(), 1e-6F, y.view());
          return read_floats(y);
        });
    expect_within(got, expect_norm(values, weights, 1e-6F), "rms_norm");
  }
}

TEST_P(RmsNormTest, MalformedShapesThrow) {
  Random random(10);
  auto x = input({2, 4}, activations(random, 8));
  auto y = output({2, 4});
  auto narrow_weight = make_tensor(backend(), {3}, random.floats(3));
  EXPECT_THROW(backend().rms_norm(x.view(), narrow_weight.view(), 1e-6F, y.view()), Error);
  auto weight = make_tensor(backend(), {4}, random.floats(4));
  auto tall = output({3, 4});
  EXPECT_THROW(backend().rms_norm(x.view(), weight.view(), 1e-6F, tall.view()), Error);
}

}  // namespace
}  // namespace kdtree::ops_test
