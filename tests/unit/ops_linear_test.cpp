#include "tests/unit/op_weights.h"

namespace kdtree::ops_test {
namespace {

class LinearTest : public OpTest {
 protected:
  // y = W x in double precision. A float32 sum of n products w * x has n roundings on every path
  // from a product to the result, in any order: one of the product and at most n - 1 of additions;
  // the float32 product code * scale of INT4 is one more. So |error| <= (n + 1) u sum |w x| to
  // first order; 1 % covers the rest.
  Expected expect_linear(const RandomWeight& w, const std::vector<float>& x,
                         std::int64_t rows) const {
    const std::int64_t in = w.view().in_features;
    Expected want;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t o = 0; o < w.view().out_features; ++o) {
        double sum = 0;
        double magnitude = 0;
        for (std::int64_t i = 0; i < in; ++i) {
          const double product = w.at(o, i) * x[static_cast<std::size_t>(r * in + i)];
          sum += product;
          magnitude += std::abs(product);
        }
        want.add(sum, 1.01 * static_cast<double>(in + 1) * kRound * magnitude + store_error(sum));
      }
    }
    return want;
  }
};
KDTREE_TEST_ALL_BACKENDS(LinearTest);

TEST_P(LinearTest, MatchesDoublePrecision) {
  Random random(1);
  for (const WeightKind& kind : all_weight_kinds()) {
    const std::int64_t unit = std::max<std::int64_t>(1, kind.group_size);
    for (const std::int64_t in : {1, 3, 5, 9, 33}) {
      for (const std::int64_t out : {1, 2, 5, 12}) {
        for (const std::int64_t rows : {1, 2, 3, 9}) {
          const RandomWeight w(backend(), kind, out, in * unit, random);
          const auto values = activations(random, rows * in * unit);
          auto x = input({rows, in * unit}, values);
          auto y = output({rows, out});
          backend().linear(w.view(), x.view(), y.view());
          expect_within(read_floats(y), expect_linear(w, values, rows),
                        kind.name() + " in " + std::to_string(in * unit));
        }
      }
    }
  }
}

// Sizes at which an implementation that works in blocks crosses their borders.
TEST_P(LinearTest, LargeShapes) {
  Random random(2);
  auto kinds = all_weight_kinds();
  kinds.push_back({WeightFormat::kInt4Group, 96, DType::kFloat32});
  kinds.push_back({WeightFormat::kInt4Group, 576, DType::kBFloat16});
  kinds.push_back({WeightFormat::kInt4Group, 1152, DType::kFloat32});
  for (const WeightKind& kind : kinds) {
    for (const std::int64_t rows : {1, 17, 67}) {
      const std::int64_t in = kind.group_size == 0 ? 1037 : 1152;
      const RandomWeight w(backend(), kind, 35, in, random);
      const auto values = activations(random, rows * in);
      auto x = input({rows, in}, values);
      auto y = output({rows, 35});
      backend().linear(w.view(), x.view(), y.view());
      expect_within(read_floats(y), expect_linear(w, values, rows), kind.name());
    }
  }
}

TEST_P(LinearTest, StridedRows) {
  Random random(3);
  for (const WeightKind& kind : all_weight_kinds()) {
    const std::int64_t in = kind.group_size == 0 ? 13 : 2 * kind.group_size;
    const RandomWeight w(backend(), kind, 7, in, random);
    const auto values = activations(random, 5 * in);
    auto x = input({5, in}, values, in + 9);
    auto y = output({5, 7}, 11);
    backend().linear(w.view(), x.view(), y.view());
    expect_within(read_floats(y), expect_linear(w, values, 5), kind.name());
  }
}

TEST_P(LinearTest, Float32OutputOnAnyBackend) {
  Random random(4);
  const RandomWeight w(backend(), {WeightFormat::kBFloat16}, 6, 40, random);
  const auto values = activations(random, 120);
  auto x = input({3, 40}, values);
  GuardedTensor y(backend(), DType::kFloat32, {3, 6});
  backend().linear(w.view(), x.view(), y.view());
  expect_within(y.download<float>(), expect_linear(w, values, 3), "float32 y");
}

// Every code of every nibble, against the definition written out: (code - 8) * scale.
TEST_P(LinearTest, Int4CodesOneByOne) {
  for (std::int32_t place = 0; place < 8; ++place) {
    std::vector<std::int32_t> words;
    for (std::uint32_t code = 0; code < 16; ++code) {
      words.push_back(static_cast<std::int32_t>(0x88888888U ^ ((code ^ 8U) << (4 * place))));
    }
    auto data = make_tensor(backend(), {16, 1}, words);
    auto scales = make_tensor(backend(), {16, 1}, std::vector<float>(16, 0.5F));
    const WeightView w = {.format = WeightFormat::kInt4Group,
                          .out_features = 16,
                          .in_features = 8,
                          .data = data.view().raw(),
                          .scales = scales.view().raw(),
                          .scale_dtype = DType::kFloat32,
                          .group_size = 8};
    auto x = input({1, 8}, std::vector<float>(8, 1.0F));
    GuardedTensor y(backend(), DType::kFloat32, {1, 16});
    backend().linear(w, x.view(), y.view());
    const auto got = y.download<float>();
    for (int code = 0; code < 16; ++code) {
      EXPECT_EQ(got[static_cast<std::size_t>(code)], static_cast<float>(code - 8) * 0.5F);
    }
  }
}

// The product with a float32 scale keeps float32 precision: at bf16 precision this would be off by
// up to 2^-8.
TEST_P(LinearTest, Int4ScalesAreNotRoundedToBfloat16) {
  const float scale = 1.0F + 0x1p-12F;
  auto data = make_tensor(backend(), {1, 1},
                          std::vector<std::int32_t>{static_cast<std::int32_t>(0x8888888FU)});
  auto scales = make_tensor(backend(), {1, 1}, std::vector<float>{scale});
  const WeightView w = {.format = WeightFormat::kInt4Group,
                        .out_features = 1,
                        .in_features = 8,
                        .data = data.view().raw(),
                        .scales = scales.view().raw(),
                        .scale_dtype = DType::kFloat32,
                        .group_size = 8};
  auto x = input({1, 8}, std::vector<float>(8, 1.0F));
  GuardedTensor y(backend(), DType::kFloat32, {1, 1});
  backend().linear(w, x.view(), y.view());
  EXPECT_EQ(y.download<float>()[0], 7.0F * scale);
}

TEST_P(LinearTest, EmptySizes) {
  Random random(5);
  for (const WeightKind& kind : all_weight_kinds()) {
    const std::int64_t in = std::max<std::int64_t>(8, kind.group_size);
    const RandomWeight w(backend(), kind, 4, in, random);
    auto no_rows = input({0, in}, {});
    auto no_result = output({0, 4});
    backend().linear(w.view(), no_rows.view(), no_result.view());
    EXPECT_TRUE(read_floats(no_result).empty());

    const RandomWeight no_outputs(backend(), kind, 0, in, random);
    auto x = input({3, in}, activations(random, 3 * in));
    auto nothing = output({3, 0});
    backend().linear(no_outputs.view(), x.view(), nothing.view());
    EXPECT_TRUE(read_floats(nothing).empty());

    const RandomWeight no_inputs(backend(), kind, 5, 0, random);
    auto empty = input({3, 0}, {});
    auto zeros = output({3, 5});
    backend().linear(no_inputs.view(), empty.view(), zeros.view());
    EXPECT_EQ(read_floats(zeros), std::vector<float>(15, 0.0F));
  }
}

TEST_P(LinearTest, RowsAreIndependent) {
  Random random(6);
  constexpr std::int64_t kRows = 21;
  constexpr std::int64_t kOut = 37;
  for (const WeightKind& kind : all_weight_kinds()) {
    const std::int64_t in = kind.group_size == 0 ? 701 : 768;  // enough work for several threads
    Random weight_random(7);
    const auto values = activations(random, kRows * in);
    expect_row_independence<float>(
        kRows, [&](Backend& other, const std::vector<std::int64_t>& rows) {
          weight_random = Random(7);
          const RandomWeight w(other, kind, kOut, in, weight_random);
          const auto count = static_cast<std::int64_t>(rows.size());
          auto x = make_floats(other, activation(), {count, in}, choose_rows(values, rows, in));
          GuardedTensor y(other, activation(), {count, kOut});
          other.linear(w.view(), x.view(), y.view());
          return read_floats(y);
        });
  }
}

// Few and many rows, on shapes that a backend may keep in an order of its own as well.
TEST_P(LinearTest, RowsOfAnyCall) {
  Random random(9);
  constexpr std::int64_t kOut = 48;
  const auto num_sampled = static_cast<std::int64_t>(kSampledRows.size());
  for (const WeightKind& kind : all_weight_kinds()) {
    const std::int64_t in = kind.group_size == 0 ? 301 : 512;
    const RandomWeight w(backend(), kind, kOut, in, random);
    const auto values = activations(random, kMostRows * in);
    for (const DType y_dtype : {activation(), DType::kFloat32}) {
      const auto got = expect_rows_of_any_call<float>(
          [&](Backend& other, const std::vector<std::int64_t>& rows) {
            const auto count = static_cast<std::int64_t>(rows.size());
            auto x = make_floats(other, activation(), {count, in}, choose_rows(values, rows, in));
            GuardedTensor y(other, y_dtype, {count, kOut});
            other.linear(w.view(), x.view(), y.view());
            return read_floats(y);
          });
      expect_within(choose_rows(got, kSampledRows, kOut),
                    expect_linear(w, choose_rows(values, kSampledRows, in), num_sampled),
                    kind.name());
      if (activation() == DType::kFloat32) {
        break;  // both are the same
      }
    }
  }
}

// The order of kernels/cpu/lanes.h, one element after the other: element i is
// fused into lane i % 8, and the lanes are added as a fixed tree.
float dot_by_lanes(const RandomWeight& w, std::int64_t out, const float* x) {
  float lanes[8] = {};
  const std::int64_t in = w.view().in_features;
  for (std::int64_t i = 0; i < (in + 7) / 8 * 8; ++i) {
    lanes[i % 8] = std::fma(i < in ? static_cast<float>(w.at(out, i)) : 0.0F, i < in ? x[i] : 0.0F,
                            lanes[i % 8]);
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// Every number of rows and of outputs that a tile of the CPU backend may leave over, every kind of
// tail of a row: always these very bits.
TEST(CpuLinearTest, SumsRunInTheOrderOfLanes) {
  const auto backend = make_test_backend("cpu", 1);
  auto kinds = all_weight_kinds();
  kinds.push_back({WeightFormat::kInt4Group, 64, DType::kFloat32});
  kinds.push_back({WeightFormat::kInt4Group, 64, DType::kBFloat16});
  Random random(11);
  for (const WeightKind& kind : kinds) {
    // Multiples of neither 8 nor the 512 elements of a chunk; with groups, one to several of them.
    std::vector<std::int64_t> widths = {1, 7, 8, 9, 45, 192, 517, 1030};
    if (kind.group_size > 0) {
      widths = {kind.group_size, 3 * kind.group_size, 5 * kind.group_size, 1152};
    }
    for (const std::int64_t in : widths) {
      for (std::int64_t rows = 1; rows <= 9; ++rows) {
        const std::int64_t out = 1 + random.below(9);
        const RandomWeight w(*backend, kind, out, in, random);
        const auto values = random.floats(rows * in);
        auto x = make_floats(*backend, DType::kFloat32, {rows, in}, values);
        GuardedTensor y(*backend, DType::kFloat32, {rows, out});
        backend->linear(w.view(), x.view(), y.view());
        std::vector<float> want;
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t o = 0; o < out; ++o) {
            want.push_back(dot_by_lanes(w, o, values.data() + r * in));
          }
        }
        ASSERT_EQ(read_floats(y), want)
            << kind.name() << " [" << out << ", " << in << "], " << rows << " rows";
      }
    }
  }
}

TEST_P(LinearTest, MalformedShapesThrow) {
  Random random(8);
  const RandomWeight w(backend(), {WeightFormat::kFloat32}, 4, 8, random);
  auto x = input({2, 8}, activations(random, 16));
  auto y = output({2, 4});
  auto narrow = input({2, 7}, activations(random, 14));
  auto long_y = output({3, 4});
  EXPECT_THROW(backend().linear(w.view(), narrow.view(), y.view()), Error);
  EXPECT_THROW(backend().linear(w.view(), x.view(), long_y.view()), Error);
  WeightView broken = w.view();
  broken.format = WeightFormat::kInt4Group;
  broken.scales = broken.data;
  for (const std::int64_t group_size : {0, 4, 16, -8}) {
    broken.group_size = group_size;
    EXPECT_THROW(backend().linear(broken, x.view(), y.view()), Error) << group_size;
  }
  broken.group_size = 8;
  broken.scales = nullptr;
  EXPECT_THROW(backend().linear(broken, x.view(), y.view()), Error);
}

}  // namespace
}  // namespace kdtree::ops_test
