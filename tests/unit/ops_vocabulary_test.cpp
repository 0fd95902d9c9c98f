// top_k, log_sum_exp_partials and merge_top_k.
#include "core/partition.h"
#include "tests/unit/op_test.h"

namespace kdtree::ops_test {
namespace {

constexpr float kInfiniteLogit = std::numeric_limits<float>::infinity();
constexpr float kNanLogit = std::numeric_limits<float>::quiet_NaN();

struct Candidates {
  std::vector<float> values;
  std::vector<std::int32_t> ids;
};

// Sorts all of one row; NaN counts as -infinity.
Candidates sorted_row(const std::vector<float>& logits, std::int32_t first_id, std::int64_t k) {
  std::vector<std::pair<float, std::int32_t>> all;
  for (std::size_t c = 0; c < logits.size(); ++c) {
    all.emplace_back(std::isnan(logits[c]) ? kInfiniteLogit : -logits[c],
                     first_id + static_cast<std::int32_t>(c));
  }
  std::sort(all.begin(), all.end());
  all.resize(static_cast<std::size_t>(k), {kInfiniteLogit, -1});
  Candidates want;
  for (const auto& [negative, id] : all) {
    want.values.push_back(-negative);
    want.ids.push_back(id);
  }
  return want;
}

// Few different values, some of them special.
std::vector<float> tied_logits(Random& random, std::int64_t count) {
  constexpr float kValues[] = {0.0F, 1.0F, -2.5F, 3.0F, -kInfiniteLogit, kNanLogit};
  std::vector<float> logits(static_cast<std::size_t>(count));
  for (float& value : logits) {
    value = kValues[random.below(6)];
  }
  return logits;
}

struct Logits {
  std::int64_t rows = 1;
  std::int64_t cols = 0;
  std::vector<float> values;  // [rows, cols]

  static Logits row(const std::vector<float>& values) {
    return {1, static_cast<std::int64_t>(values.size()), values};
  }
};

class VocabularyTest : public OpTest {
 protected:
  static Candidates top_k(Backend& other, const Logits& logits, std::int64_t first_id,
                          std::int64_t k) {
    auto logit = make_floats(other, DType::kFloat32, {logits.rows, logits.cols}, logits.values,
                             logits.cols + 5);
    GuardedTensor values(other, DType::kFloat32, {logits.rows, k});
    GuardedTensor ids(other, DType::kInt32, {logits.rows, k});
    other.top_k(logit.view(), first_id, values.view(), ids.view());
    return {values.download<float>(), ids.download<std::int32_t>()};
  }

  static std::vector<float> partials(Backend& other, const Logits& logits) {
    auto logit = make_floats(other, DType::kFloat32, {logits.rows, logits.cols}, logits.values,
                             logits.cols + 2);
    GuardedTensor out(other, DType::kFloat32, {logits.rows, 2});
    other.log_sum_exp_partials(logit.view(), out.view());
    return out.download<float>();
  }

  struct Parts {
    std::int64_t count = 0;
    std::int64_t k_in = 0;
    std::vector<float> values;      // [parts, rows, k_in]
    std::vector<std::int32_t> ids;  // [parts, rows, k_in]
    std::vector<float> partials;    // [parts, rows, 2], or empty
  };

  static Candidates merge(Backend& other, const Parts& parts, std::int64_t rows,
                          std::int64_t k_out) {
    auto part_values = make_tensor(other, {parts.count, rows, parts.k_in}, parts.values);
    auto part_ids = make_tensor(other, {parts.count, rows, parts.k_in}, parts.ids);
    GuardedTensor part_sums(other, DType::kFloat32,
                            {parts.partials.empty() ? 0 : parts.count, rows, 2});
    part_sums.upload(parts.partials);
    GuardedTensor values(other, DType::kFloat32, {rows, k_out});
    GuardedTensor ids(other, DType::kInt32, {rows, k_out});
    other.merge_top_k(part_values.view(), part_ids.view(),
                      parts.partials.empty() ? ConstTensorView() : part_sums.view(), values.view(),
                      ids.view());
    return {values.download<float>(), ids.download<std::int32_t>()};
  }

  // What `count` ranks find in their parts of the vocabulary.
  static Parts split(Backend& other, const Logits& logits, std::int64_t count, std::int64_t k_in) {
    Parts parts = {.count = count, .k_in = k_in, .values = {}, .ids = {}, .partials = {}};
    for (std::int64_t p = 0; p < count; ++p) {
      const Range range = partition(logits.cols, count, p);
      Logits part = {logits.rows, range.size(), {}};
      for (std::int64_t r = 0; r < logits.rows; ++r) {
        const auto row = row_of(logits.values, r, logits.cols);
        part.values.insert(part.values.end(), row.begin() + range.begin, row.begin() + range.end);
      }
      const Candidates found = top_k(other, part, range.begin, k_in);
      const auto sums = partials(other, part);
      parts.values.insert(parts.values.end(), found.values.begin(), found.values.end());
      parts.ids.insert(parts.ids.end(), found.ids.begin(), found.ids.end());
      parts.partials.insert(parts.partials.end(), sums.begin(), sums.end());
    }
    return parts;
  }

  static constexpr std::int64_t kBest = 16;

  // [rows, 2 * kBest + 2]: a row's best log-probabilities, their ids, and the sums of its first
  // half.
  static std::vector<float> head_of(Backend& other, const Logits& logits) {
    const Parts parts = split(other, logits, 2, kBest);
    const Candidates merged = merge(other, parts, logits.rows, kBest);
    std::vector<float> all;
    for (std::int64_t r = 0; r < logits.rows; ++r) {
      const auto values = row_of(merged.values, r, kBest);
      const auto ids = row_of(merged.ids, r, kBest);
      const auto sums = row_of(parts.partials, r, 2);
      all.insert(all.end(), values.begin(), values.end());
      all.insert(all.end(), ids.begin(), ids.end());
      all.insert(all.end(), sums.begin(), sums.end());
    }
    return all;
  }

  // log-softmax over the whole vocabulary. The sums of the parts are off by a factor within 1 +-
  // (30 + 2 + n) u (as PartialsMatchDoublePrecision derives it), their merger by another
  // exponential of a difference, a product and an addition a part, each at most (30 + 2 + parts) u;
  // the logarithm makes that an absolute error. Its own rounding and that of its value, m and the
  // logit are relative to their sizes.
  static void add_log_probs(const std::vector<float>& row, const std::vector<float>& best,
                            std::int64_t num_parts, Expected& want) {
    const double highest = *std::max_element(row.begin(), row.end());
    double sum = 0;
    for (const float value : row) {
      sum += std::exp(value - highest);
    }
    for (const float value : best) {
      const double sum_roundings =
          2 * (30 + 2) + static_cast<double>(static_cast<std::int64_t>(row.size()) + 2 * num_parts);
      const double sizes = 2 * (std::abs(highest) + std::abs(value) + 2 * std::log(sum));
      want.add(value - highest - std::log(sum), 1.01 * (sum_roundings + sizes) * kRound);
    }
  }
};

KDTREE_TEST_ALL_BACKENDS(VocabularyTest);

TEST_P(VocabularyTest, TopKEqualsASort) {
  Random random(1);
  for (const std::int64_t cols : {0, 1, 2, 7, 100, 3001}) {
    for (const std::int64_t k : {0, 1, 2, 8, 65, 512}) {
      for (const bool tied : {false, true}) {
        for (const std::int32_t first_id : {0, 1000}) {
          const auto logits = tied ? tied_logits(random, 2 * cols) : random.floats(2 * cols, -9, 9);
          const Candidates got = top_k(backend(), {2, cols, logits}, first_id, k);
          for (std::int64_t r = 0; r < 2; ++r) {
            const Candidates want = sorted_row(row_of(logits, r, cols), first_id, k);
            EXPECT_EQ(row_of(got.values, r, k), want.values) << cols << " " << k;
            EXPECT_EQ(row_of(got.ids, r, k), want.ids) << cols << " " << k;
          }
        }
      }
    }
  }
}

TEST_P(VocabularyTest, TopKOfSpecialRows) {
  EXPECT_EQ(top_k(backend(), Logits::row({5, 5, 5, 5}), 0, 2).ids,
            (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(top_k(backend(), Logits::row({kNanLogit, kNanLogit, kNanLogit}), 7, 4).ids,
            (std::vector<std::int32_t>{7, 8, 9, -1}));
  EXPECT_EQ(top_k(backend(), Logits::row({kNanLogit, -kInfiniteLogit, kInfiniteLogit}), 0, 3).ids,
            (std::vector<std::int32_t>{2, 0, 1}));
  EXPECT_EQ(top_k(backend(), Logits::row({-0.0F, 0.0F}), 0, 1).ids, (std::vector<std::int32_t>{0}));
  EXPECT_EQ(top_k(backend(), Logits::row({kNanLogit}), 0, 2).values,
            (std::vector<float>{-kInfiniteLogit, -kInfiniteLogit}));
  EXPECT_TRUE(top_k(backend(), {0, 3, {}}, 0, 2).ids.empty());
}

// A sum of n exponentials: the difference is rounded once, which exp turns into a relative error of
// |x - m| u; exp itself 2 u; at most n additions.
TEST_P(VocabularyTest, PartialsMatchDoublePrecision) {
  Random random(2);
  for (const std::int64_t cols : {1, 2, 9, 1000, 5003}) {
    const auto logits = random.floats(3 * cols, -15, 15);
    const auto got = partials(backend(), {3, cols, logits});
    for (std::int64_t r = 0; r < 3; ++r) {
      const auto row = row_of(logits, r, cols);
      const double highest = *std::max_element(row.begin(), row.end());
      double sum = 0;
      for (const float value : row) {
        sum += std::exp(value - highest);
      }
      EXPECT_EQ(got[static_cast<std::size_t>(2 * r)], highest);
      EXPECT_NEAR(got[static_cast<std::size_t>(2 * r + 1)], sum,
                  1.01 * (30 + 2 + static_cast<double>(cols)) * kRound * sum);
    }
  }
}

TEST_P(VocabularyTest, PartialsOfSpecialRows) {
  EXPECT_EQ(partials(backend(), {2, 0, {}}),
            (std::vector<float>{-kInfiniteLogit, 0, -kInfiniteLogit, 0}));
  EXPECT_EQ(partials(backend(), Logits::row({kNanLogit, -kInfiniteLogit})),
            (std::vector<float>{-kInfiniteLogit, 0}));
  EXPECT_EQ(partials(backend(), Logits::row({kNanLogit, 3, 3, -kInfiniteLogit})),
            (std::vector<float>{3, 2}));
  EXPECT_EQ(partials(backend(), Logits::row({kInfiniteLogit, 1, kInfiniteLogit})),
            (std::vector<float>{kInfiniteLogit, 2}));
  EXPECT_EQ(partials(backend(), Logits::row({1e30F, -1e30F})), (std::vector<float>{1e30F, 1}));
}

TEST_P(VocabularyTest, MergeEqualsASortOfTheWhole) {
  Random random(3);
  for (const std::int64_t vocab : {3, 10, 257}) {
    for (const std::int64_t count : {1, 2, 3, 5}) {  // parts of 0 among them
      for (const std::int64_t k : {1, 4, 16}) {
        for (const bool tied : {false, true}) {
          const auto logits =
              tied ? tied_logits(random, 3 * vocab) : random.floats(3 * vocab, -9, 9);
          Parts parts = split(backend(), {3, vocab, logits}, count, k);
          parts.partials.clear();
          const Candidates got = merge(backend(), parts, 3, k);
          for (std::int64_t r = 0; r < 3; ++r) {
            const Candidates want = sorted_row(row_of(logits, r, vocab), 0, k);
            EXPECT_EQ(row_of(got.values, r, k), want.values);
            EXPECT_EQ(row_of(got.ids, r, k), want.ids);
          }
        }
      }
    }
  }
}

TEST_P(VocabularyTest, MergeOfOtherWidths) {
  const Parts parts = {
      .count = 2, .k_in = 2, .values = {5, 1, 5, 3}, .ids = {9, 4, 2, 0}, .partials = {}};
  EXPECT_EQ(merge(backend(), parts, 1, 1).ids, (std::vector<std::int32_t>{2}));
  const Candidates more = merge(backend(), parts, 1, 6);
  EXPECT_EQ(more.ids, (std::vector<std::int32_t>{2, 9, 0, 4, -1, -1}));
  EXPECT_EQ(more.values, (std::vector<float>{5, 5, 3, 1, -kInfiniteLogit, -kInfiniteLogit}));
  EXPECT_TRUE(
      merge(backend(), {.count = 2, .k_in = 3, .values = {}, .ids = {}, .partials = {}}, 0, 2)
          .ids.empty());
}

TEST_P(VocabularyTest, LogProbabilitiesMatchDoublePrecision) {
  Random random(4);
  for (const std::int64_t vocab : {2, 50, 2000}) {
    for (const std::int64_t count : {1, 3, 4}) {
      const auto logits = random.floats(4 * vocab, -15, 15);
      const Candidates got = merge(backend(), split(backend(), {4, vocab, logits}, count, 8), 4, 8);
      Expected want;
      for (std::int64_t r = 0; r < 4; ++r) {
        const auto row = row_of(logits, r, vocab);
        const Candidates best = sorted_row(row, 0, 8);
        EXPECT_EQ(row_of(got.ids, r, 8), best.ids);
        add_log_probs(row, best.values, count, want);
      }
      expect_within(got.values, want, "log-probabilities");
    }
  }
}

TEST_P(VocabularyTest, LogProbabilitiesOfSpecialRows) {
  // One token has all the weight; the others are impossible.
  const Candidates sure = merge(
      backend(),
      split(backend(), Logits::row({-kInfiniteLogit, 4, kNanLogit, -kInfiniteLogit}), 2, 3), 1, 3);
  EXPECT_EQ(sure.values, (std::vector<float>{0, -kInfiniteLogit, -kInfiniteLogit}));
  EXPECT_EQ(sure.ids, (std::vector<std::int32_t>{1, 0, 2}));
  const Candidates none =
      merge(backend(), split(backend(), Logits::row({kNanLogit, kNanLogit}), 2, 1), 1, 2);
  EXPECT_EQ(none.values, (std::vector<float>{-kInfiniteLogit, -kInfiniteLogit}));
}

TEST_P(VocabularyTest, RowsAreIndependent) {
  Random random(5);
  constexpr std::int64_t kRows = 9;
  constexpr std::int64_t kVocab = 40001;
  const auto logits = random.floats(kRows * kVocab, -15, 15);
  expect_row_independence<float>(kRows, [&](Backend& other, const std::vector<std::int64_t>& rows) {
    return head_of(
        other, {static_cast<std::int64_t>(rows.size()), kVocab, choose_rows(logits, rows, kVocab)});
  });
}

TEST_P(VocabularyTest, RowsOfAnyCall) {
  Random random(6);
  // Wide enough for several blocks of threads a row; the CPU has none.
  const std::int64_t vocab = backend().name() == "cpu" ? 5003 : 40001;
  const auto logits = random.floats(kMostRows * vocab, -15, 15);
  const auto got =
      expect_rows_of_any_call<float>([&](Backend& other, const std::vector<std::int64_t>& rows) {
        return head_of(other, {static_cast<std::int64_t>(rows.size()), vocab,
                               choose_rows(logits, rows, vocab)});
      });
  Expected want;
  std::vector<float> log_probs;
  for (std::int64_t r = 0; r < kMostRows; ++r) {
    const auto row = row_of(got, r, 2 * kBest + 2);
    const auto row_logits = row_of(logits, r, vocab);
    const Candidates best = sorted_row(row_logits, 0, kBest);
    EXPECT_EQ(std::vector<std::int32_t>(row.begin() + kBest, row.end() - 2), best.ids);
    add_log_probs(row_logits, best.values, 2, want);
    log_probs.insert(log_probs.end(), row.begin(), row.begin() + kBest);
  }
  expect_within(log_probs, want, "log-probabilities");
}

TEST_P(VocabularyTest, MalformedShapesThrow) {
  GuardedTensor logits(backend(), DType::kFloat32, {2, 8});
  GuardedTensor values(backend(), DType::kFloat32, {2, 3});
  GuardedTensor ids(backend(), DType::kInt32, {2, 3});
  GuardedTensor other_ids(backend(), DType::kInt32, {2, 4});
  GuardedTensor tall(backend(), DType::kFloat32, {3, 2});
  EXPECT_THROW(backend().top_k(logits.view(), 0, values.view(), other_ids.view()), Error);
  EXPECT_THROW(backend().log_sum_exp_partials(logits.view(), tall.view()), Error);
  GuardedTensor part_values(backend(), DType::kFloat32, {2, 2, 3});
  GuardedTensor part_ids(backend(), DType::kInt32, {2, 2, 4});
  EXPECT_THROW(
      backend().merge_top_k(part_values.view(), part_ids.view(), {}, values.view(), ids.view()),
      Error);
}

}  // namespace
}  // namespace kdtree::ops_test
