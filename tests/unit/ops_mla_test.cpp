// rope, absorb_query and expand_value.
#include "tests/unit/op_weights.h"

namespace kdtree::ops_test {
namespace {

class RopeTest : public OpTest {
 protected:
  // Two products and their sum: each product carries two roundings, |error| <= 2 u (|a c| + |b s|),
  // and second order.
  void rotate(const std::vector<float>& table_row, RopeLayout layout, std::int64_t first,
              const std::vector<float>& x, Expected& want) const {
    const std::size_t half = table_row.size() / 2;
    for (std::size_t i = 0; i < half; ++i) {
      const bool interleaved = layout == RopeLayout::kInterleaved;
      const std::size_t place_a = static_cast<std::size_t>(first) + (interleaved ? 2 * i : i);
      const std::size_t place_b = place_a + (interleaved ? 1 : half);
      const double a = x[place_a];
      const double b = x[place_b];
      const double c = table_row[i];
      const double s = table_row[half + i];
      set(want, place_a, a * c - b * s, std::abs(a * c) + std::abs(b * s));
      set(want, place_b, a * s + b * c, std::abs(a * s) + std::abs(b * c));
    }
  }

 private:
  void set(Expected& want, std::size_t place, double value, double magnitude) const {
    want.values[place] = value;
    want.bounds[place] = 2.01 * kRound * magnitude + store_error(value);
  }
};
KDTREE_TEST_ALL_BACKENDS(RopeTest);

TEST_P(RopeTest, RotatesTheHeadsAndNothingElse) {
  Random random(1);
  for (const RopeLayout layout : {RopeLayout::kInterleaved, RopeLayout::kHalfSplit}) {
    for (const std::int64_t rope_dim : {2, 6, 64}) {
      for (const std::int64_t num_heads : {1, 3}) {
        for (const std::int64_t rows : {0, 1, 5}) {
          const std::int64_t head_stride = rope_dim + 5;
          const std::int64_t width = 3 + num_heads * head_stride;
          const auto table = random.floats(11 * rope_dim);
          const auto values = activations(random, rows * width);
          std::vector<std::int32_t> where = random.integers(rows, 11);
          auto x = input({rows, width}, values, width + 2);
          auto cos_sin = make_tensor(backend(), {11, rope_dim}, table);
          auto positions = make_indices(backend(), where);
          backend().rope({.x = x.view(),
                          .num_heads = num_heads,
                          .head_stride = head_stride,
                          .offset = 3,
                          .positions = positions.view(),
                          .cos_sin = cos_sin.view(),
                          .layout = layout});
          Expected want;
          for (const float value : values) {
            want.add(value, 0);
          }
          for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t h = 0; h < num_heads; ++h) {
              rotate(row_of(table, where[static_cast<std::size_t>(r)], rope_dim), layout,
                     r * width + 3 + h * head_stride, values, want);
            }
          }
          expect_within(read_floats(x), want, "rope");
        }
      }
    }
  }
}

TEST_P(RopeTest, RowsOfAnyCall) {
  Random random(10);
  constexpr std::int64_t kRopeDim = 64;
  constexpr std::int64_t kHeads = 3;
  constexpr std::int64_t kWidth = kHeads * kRopeDim;
  const auto table = random.floats(50 * kRopeDim);
  const auto values = activations(random, kMostRows * kWidth);
  const auto where = random.integers(kMostRows, 50);
  for (const RopeLayout layout : {RopeLayout::kInterleaved, RopeLayout::kHalfSplit}) {
    const auto got = expect_rows_of_any_call<float>([&](Backend& other,
                                                        const std::vector<std::int64_t>& rows) {
      const auto count = static_cast<std::int64_t>(rows.size());
      auto x = make_floats(other, activation(), {count, kWidth}, choose_rows(values, rows, kWidth));
      auto cos_sin = make_tensor(other, {50, kRopeDim}, table);
      auto positions = make_indices(other, choose_rows(where, rows, 1));
      other.rope({.x = x.view(),
                  .num_heads = kHeads,
                  .head_stride = kRopeDim,
                  .offset = 0,
                  .positions = positions.view(),
                  .cos_sin = cos_sin.view(),
                  .layout = layout});
      return read_floats(x);
    });
    Expected want = {std::vector<double>(values.size()), std::vector<double>(values.size())};
    for (std::int64_t r = 0; r < kMostRows; ++r) {
      for (std::int64_t h = 0; h < kHeads; ++h) {
        rotate(row_of(table, where[static_cast<std::size_t>(r)], kRopeDim), layout,
               r * kWidth + h * kRopeDim, values, want);
      }
    }
    expect_within(got, want, "rope");
  }
}

TEST_P(RopeTest, MalformedShapesThrow) {
  Random random(2);
  auto x = input({1, 8}, activations(random, 8));
  auto cos_sin = make_tensor(backend(), {4, 4}, random.floats(16));
  auto positions = make_indices(backend(), {0});
  RopeParams params = {.x = x.view(),
                       .num_heads = 2,
                       .head_stride = 4,
                       .offset = 0,
                       .positions = positions.view(),
                       .cos_sin = cos_sin.view()};
  backend().rope(params);
  params.offset = 1;
  EXPECT_THROW(backend().rope(params), Error);
  params.offset = 0;
  params.head_stride = 3;  // heads would overlap
  EXPECT_THROW(backend().rope(params), Error);
  params.head_stride = 4;
  auto odd = make_tensor(backend(), {4, 3}, random.floats(12));
  params.cos_sin = odd.view();
  EXPECT_THROW(backend().rope(params), Error);
}

constexpr MlaShape kShapes[] = {
    {.num_heads = 1,
     .qk_nope_head_dim = 1,
     .qk_rope_head_dim = 2,
     .v_head_dim = 1,
     .kv_lora_rank = 1},
    {.num_heads = 3,
     .qk_nope_head_dim = 7,
     .qk_rope_head_dim = 4,
     .v_head_dim = 5,
     .kv_lora_rank = 19},
    {.num_heads = 2,
     .qk_nope_head_dim = 16,
     .qk_rope_head_dim = 8,
     .v_head_dim = 12,
     .kv_lora_rank = 600},
};
// One head of DeepSeek-V3 and Kimi K2.
constexpr MlaShape kHeadOfDeepSeek = {.num_heads = 1,
                                      .qk_nope_head_dim = 128,
                                      .qk_rope_head_dim = 64,
                                      .v_head_dim = 128,
                                      .kv_lora_rank = 512};
constexpr WeightKind kKinds[] = {{WeightFormat::kFloat32}, {WeightFormat::kBFloat16}};

std::int64_t kv_b_rows(const MlaShape& shape) {
  return shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim);
}

class AbsorbQueryTest : public OpTest {
 protected:
  // A sum of n products: n roundings, as in LinearTest. The rotated part is copied.
  Expected expect_query(const RandomWeight& kv_b, const MlaShape& shape,
                        const std::vector<float>& q) const {
    Expected want;
    const std::int64_t width = shape.num_heads * shape.qk_head_dim();
    for (std::size_t first_of_row = 0; first_of_row < q.size();
         first_of_row += static_cast<std::size_t>(width)) {
      for (std::int64_t h = 0; h < shape.num_heads; ++h) {
        const float* head = q.data() + first_of_row + h * shape.qk_head_dim();
        const std::int64_t first = h * (shape.qk_nope_head_dim + shape.v_head_dim);
        for (std::int64_t c = 0; c < shape.kv_lora_rank; ++c) {
          double sum = 0;
          double magnitude = 0;
          for (std::int64_t n = 0; n < shape.qk_nope_head_dim; ++n) {
            sum += head[n] * kv_b.at(first + n, c);
            magnitude += std::abs(head[n] * kv_b.at(first + n, c));
          }
          want.add(sum, 1.01 * static_cast<double>(shape.qk_nope_head_dim) * kRound * magnitude +
                            store_error(sum));
        }
        for (std::int64_t c = 0; c < shape.qk_rope_head_dim; ++c) {
          want.add(head[shape.qk_nope_head_dim + c], 0);
        }
      }
    }
    return want;
  }
};
KDTREE_TEST_ALL_BACKENDS(AbsorbQueryTest);

TEST_P(AbsorbQueryTest, MatchesDoublePrecision) {
  Random random(3);
  for (const MlaShape& shape : kShapes) {
    for (const WeightKind& kind : kKinds) {
      for (const std::int64_t rows : {0, 1, 2, 9}) {
        const RandomWeight kv_b(backend(), kind, kv_b_rows(shape), shape.kv_lora_rank, random);
        const std::int64_t q_width = shape.num_heads * shape.qk_head_dim();
        const auto values = activations(random, rows * q_width);
        auto q = input({rows, q_width}, values, q_width + 3);
        auto query = output({rows, shape.num_heads * shape.latent_dim()},
                            shape.num_heads * shape.latent_dim() + 5);
        backend().absorb_query(kv_b.view(), shape, q.view(), query.view());
        expect_within(read_floats(query), expect_query(kv_b, shape, values), "absorb_query");
      }
    }
  }
}

TEST_P(AbsorbQueryTest, RowsAreIndependent) {
  Random random(4);
  constexpr MlaShape kShape = {.num_heads = 6,
                               .qk_nope_head_dim = 18,
                               .qk_rope_head_dim = 4,
                               .v_head_dim = 3,
                               .kv_lora_rank = 301};
  constexpr std::int64_t kRows = 11;
  const std::int64_t width = kShape.num_heads * kShape.qk_head_dim();
  const auto values = activations(random, kRows * width);
  for (const WeightKind& kind : kKinds) {
    expect_row_independence<float>(kRows, [&](Backend& other,
                                              const std::vector<std::int64_t>& rows) {
      Random weight_random(5);
      const RandomWeight kv_b(other, kind, kv_b_rows(kShape), kShape.kv_lora_rank, weight_random);
      const auto count = static_cast<std::int64_t>(rows.size());
      auto q = make_floats(other, activation(), {count, width}, choose_rows(values, rows, width));
      GuardedTensor query(other, activation(), {count, kShape.num_heads * kShape.latent_dim()});
      other.absorb_query(kv_b.view(), kShape, q.view(), query.view());
      return read_floats(query);
    });
  }
}

TEST_P(AbsorbQueryTest, RowsOfAnyCall) {
  Random random(11);
  for (const MlaShape& shape : {kShapes[1], kHeadOfDeepSeek}) {
    for (const WeightKind& kind : kKinds) {
      const RandomWeight kv_b(backend(), kind, kv_b_rows(shape), shape.kv_lora_rank, random);
      const std::int64_t width = shape.num_heads * shape.qk_head_dim();
      const auto values = activations(random, kMostRows * width);
      const std::int64_t query_width = shape.num_heads * shape.latent_dim();
      const auto got = expect_rows_of_any_call<float>([&](Backend& other,
                                                          const std::vector<std::int64_t>& rows) {
        const auto count = static_cast<std::int64_t>(rows.size());
        auto q = make_floats(other, activation(), {count, width}, choose_rows(values, rows, width));
        GuardedTensor query(other, activation(), {count, query_width});
        other.absorb_query(kv_b.view(), shape, q.view(), query.view());
        return read_floats(query);
      });
      expect_within(choose_rows(got, kSampledRows, query_width),
                    expect_query(kv_b, shape, choose_rows(values, kSampledRows, width)),
                    "absorb_query");
    }
  }
}

class ExpandValueTest : public OpTest {
 protected:
  // As expect_query.
  Expected expect_value(const RandomWeight& kv_b, const MlaShape& shape,
                        const std::vector<float>& o_latent) const {
    Expected want;
    const std::int64_t width = shape.num_heads * shape.kv_lora_rank;
    for (std::size_t first_of_row = 0; first_of_row < o_latent.size();
         first_of_row += static_cast<std::size_t>(width)) {
      for (std::int64_t h = 0; h < shape.num_heads; ++h) {
        const float* latent = o_latent.data() + first_of_row + h * shape.kv_lora_rank;
        for (std::int64_t v = 0; v < shape.v_head_dim; ++v) {
          const std::int64_t row =
              h * (shape.qk_nope_head_dim + shape.v_head_dim) + shape.qk_nope_head_dim + v;
          double sum = 0;
          double magnitude = 0;
          for (std::int64_t c = 0; c < shape.kv_lora_rank; ++c) {
            sum += latent[c] * kv_b.at(row, c);
            magnitude += std::abs(latent[c] * kv_b.at(row, c));
          }
          want.add(sum, 1.01 * static_cast<double>(shape.kv_lora_rank) * kRound * magnitude +
                            store_error(sum));
        }
      }
    }
    return want;
  }
};
KDTREE_TEST_ALL_BACKENDS(ExpandValueTest);

TEST_P(ExpandValueTest, MatchesDoublePrecision) {
  Random random(6);
  for (const MlaShape& shape : kShapes) {
    for (const WeightKind& kind : kKinds) {
      for (const std::int64_t rows : {0, 1, 2, 9}) {
        const RandomWeight kv_b(backend(), kind, kv_b_rows(shape), shape.kv_lora_rank, random);
        const std::int64_t width = shape.num_heads * shape.kv_lora_rank;
        const auto values = activations(random, rows * width);
        auto o_latent = input({rows, width}, values, width + 1);
        auto out = output({rows, shape.num_heads * shape.v_head_dim},
                          shape.num_heads * shape.v_head_dim + 2);
        backend().expand_value(kv_b.view(), shape, o_latent.view(), out.view());
        expect_within(read_floats(out), expect_value(kv_b, shape, values), "expand_value");
      }
    }
  }
}

TEST_P(ExpandValueTest, RowsAreIndependent) {
  Random random(7);
  constexpr MlaShape kShape = {.num_heads = 6,
                               .qk_nope_head_dim = 3,
                               .qk_rope_head_dim = 4,
                               .v_head_dim = 17,
                               .kv_lora_rank = 301};
  constexpr std::int64_t kRows = 11;
  const std::int64_t width = kShape.num_heads * kShape.kv_lora_rank;
  const auto values = activations(random, kRows * width);
  for (const WeightKind& kind : kKinds) {
    expect_row_independence<float>(kRows, [&](Backend& other,
                                              const std::vector<std::int64_t>& rows) {
      Random weight_random(8);
      const RandomWeight kv_b(other, kind, kv_b_rows(kShape), kShape.kv_lora_rank, weight_random);
      const auto count = static_cast<std::int64_t>(rows.size());
      auto o_latent =
          make_floats(other, activation(), {count, width}, choose_rows(values, rows, width));
      GuardedTensor out(other, activation(), {count, kShape.num_heads * kShape.v_head_dim});
      other.expand_value(kv_b.view(), kShape, o_latent.view(), out.view());
      return read_floats(out);
    });
  }
}

TEST_P(ExpandValueTest, RowsOfAnyCall) {
  Random random(12);
  for (const MlaShape& shape : {kShapes[1], kHeadOfDeepSeek}) {
    for (const WeightKind& kind : kKinds) {
      const RandomWeight kv_b(backend(), kind, kv_b_rows(shape), shape.kv_lora_rank, random);
      const std::int64_t width = shape.num_heads * shape.kv_lora_rank;
      const auto values = activations(random, kMostRows * width);
      const std::int64_t out_width = shape.num_heads * shape.v_head_dim;
      const auto got = expect_rows_of_any_call<float>(
          [&](Backend& other, const std::vector<std::int64_t>& rows) {
            const auto count = static_cast<std::int64_t>(rows.size());
            auto o_latent =
                make_floats(other, activation(), {count, width}, choose_rows(values, rows, width));
            GuardedTensor out(other, activation(), {count, out_width});
            other.expand_value(kv_b.view(), shape, o_latent.view(), out.view());
            return read_floats(out);
          });
      expect_within(choose_rows(got, kSampledRows, out_width),
                    expect_value(kv_b, shape, choose_rows(values, kSampledRows, width)),
                    "expand_value");
    }
  }
}

TEST_P(ExpandValueTest, MalformedShapesThrow) {
  Random random(9);
  const MlaShape& shape = kShapes[1];
  const RandomWeight kv_b(backend(), kKinds[0], kv_b_rows(shape), shape.kv_lora_rank, random);
  const RandomWeight short_kv_b(backend(), kKinds[0], kv_b_rows(shape) - 1, shape.kv_lora_rank,
                                random);
  auto o_latent = input({1, 57}, activations(random, 57));
  auto out = output({1, 15});
  auto narrow = output({1, 14});
  EXPECT_THROW(backend().expand_value(short_kv_b.view(), shape, o_latent.view(), out.view()),
               Error);
  EXPECT_THROW(backend().expand_value(kv_b.view(), shape, o_latent.view(), narrow.view()), Error);
  auto q = input({1, 33}, activations(random, 33));
  auto query = output({1, 68});  // one below 3 * (19 + 4)
  EXPECT_THROW(backend().absorb_query(kv_b.view(), shape, q.view(), query.view()), Error);
}

}  // namespace
}  // namespace kdtree::ops_test
