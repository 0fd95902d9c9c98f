// What the kernel benchmark is built of: statistics, expert lists, data, checks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "config/model_config.h"
#include "core/json_text.h"
#include "study/bench_check.h"
#include "study/bench_data.h"
#include "study/bench_statistics.h"
#include "study/expert_lists.h"
#include "study/kernel_bench.h"

namespace kdtree {
namespace {

// A file of configs/models.
std::string model_config_path(const std::string& name) {
  const char* source = std::getenv("KDTREE_SOURCE");
  return (source == nullptr ? "" : std::string(source) + "/") + "configs/models/" + name;
}

ModelConfig read_model_config(const std::string& name) {
  const std::string path = model_config_path(name);
  return parse_model_config(read_json_file(path), path);
}

TEST(BenchStatisticsTest, MedianMinimumMaximum) {
  const TimeSummary odd = summarize_times({3, 1, 8});
  EXPECT_EQ(odd.median_us, 3);
  EXPECT_EQ(odd.min_us, 1);
  EXPECT_EQ(odd.max_us, 8);
  EXPECT_EQ(summarize_times({4, 1, 2, 100}).median_us, 3);
  EXPECT_EQ(summarize_times({7}).median_us, 7);
  EXPECT_THROW(summarize_times({}), Error);
}

void expect_legal(const std::vector<std::int32_t>& lists, std::int64_t k, std::int64_t experts) {
  for (std::size_t first = 0; first < lists.size(); first += static_cast<std::size_t>(k)) {
    const std::set<std::int32_t> row(lists.begin() + static_cast<std::ptrdiff_t>(first),
                                     lists.begin() + static_cast<std::ptrdiff_t>(first) + k);
    EXPECT_EQ(static_cast<std::int64_t>(row.size()), k) << "an expert twice in a row";
    EXPECT_GE(*row.begin(), 0);
    EXPECT_LT(*row.rbegin(), experts);
  }
}

TEST(ExpertListsTest, RowsNameDifferentExperts) {
  for (const ExpertHistogram histogram :
       {ExpertHistogram::kUniform, ExpertHistogram::kZipf, ExpertHistogram::kOne}) {
    ExpertListSource source(histogram, 24, 7);
    for (const std::int64_t rows : {1, 5, 64}) {
      const auto lists = source.draw(rows, 8);
      ASSERT_EQ(static_cast<std::int64_t>(lists.size()), rows * 8);
      expect_legal(lists, 8, 24);
    }
    EXPECT_EQ(source.draw(0, 8).size(), 0U);
    expect_legal(source.draw(3, 24), 24, 24);
    EXPECT_THROW(source.draw(1, 25), Error);
  }
}

// How often each expert is chosen, the most popular first.
std::vector<std::int64_t> popularity(ExpertHistogram histogram) {
  ExpertListSource source(histogram, 64, 3);
  std::map<std::int32_t, std::int64_t> counts;
  for (const std::int32_t expert : source.draw(2000, 4)) {
    ++counts[expert];
  }
  std::vector<std::int64_t> sorted(64);
  for (const auto& [expert, count] : counts) {
    sorted[static_cast<std::size_t>(expert)] = count;
  }
  std::sort(sorted.rbegin(), sorted.rend());
  return sorted;
}

TEST(ExpertListsTest, HistogramsHaveTheirShapes) {
  // 2000 * 4 / 64 = 125 each; the deviations are those of this seed, far inside 5 sigma.
  const auto uniform = popularity(ExpertHistogram::kUniform);
  EXPECT_LT(uniform.front(), 180);
  EXPECT_GT(uniform.back(), 70);
  const auto zipf = popularity(ExpertHistogram::kZipf);
  EXPECT_GT(zipf.front(), 1200);  // most rows have the favourite
  EXPECT_LT(zipf.back(), 60);
  const auto one = popularity(ExpertHistogram::kOne);
  EXPECT_EQ(one[3], 2000);
  EXPECT_EQ(one[4], 0);
}

TEST(ExpertListsTest, CountsWhatIsHere) {
  const std::vector<std::int32_t> slots = {-1, 0, 1, -1};
  EXPECT_EQ(num_distinct_slots({0, 1, 1, 2, 3, 1}, slots), 2);
  EXPECT_EQ(num_local_pairs({0, 1, 1, 2, 3, 1}, slots), 4);
  EXPECT_EQ(num_distinct_slots({}, slots), 0);
}

// What a check makes again is what lies on the device.
TEST(BenchDataTest, ElementsAreMadeAgain) {
  const auto backend = make_backend({.name = "cpu"});
  const LargeValues values{.seed = 5, .exponent = -7};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const DeviceTensor tensor(*backend, dtype, Shape{1001, 17});
    fill_large(*backend, values, tensor.view());
    const std::vector<float> got = download_rows(*backend, tensor.view(), 0, 1001);
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i], values.at(static_cast<std::int64_t>(i))) << i;
    }
  }
}

// A product with a unit vector is a weight.
void expect_rows(Backend& backend, const BenchMatrix& matrix) {
  const std::int64_t in = matrix.view().in_features;
  const std::int64_t out = matrix.view().out_features;
  std::vector<float> unit(static_cast<std::size_t>(in));
  const DeviceTensor y(backend, DType::kFloat32, Shape{1, out});
  for (std::int64_t i = 0; i < in; ++i) {
    unit[static_cast<std::size_t>(i)] = 1;
    const DeviceTensor x = upload_floats(backend, DType::kFloat32, Shape{1, in}, unit);
    unit[static_cast<std::size_t>(i)] = 0;
    backend.linear(matrix.view(), x.view(), y.view());
    const std::vector<float> column = download_rows(backend, y.view(), 0, 1);
    for (std::int64_t o = 0; o < out; ++o) {
      ASSERT_EQ(column[static_cast<std::size_t>(o)], matrix.row(o)[static_cast<std::size_t>(i)])
          << o << ", " << i;
    }
  }
}

TEST(BenchDataTest, RowsOfMatricesAreExact) {
  const auto backend = make_backend({.name = "cpu"});
  expect_rows(*backend, BenchMatrix(*backend, 5, 19, 11));
  expect_rows(*backend, BenchMatrix(*backend, 6, 64, 32, 12));
  expect_rows(*backend, BenchMatrix(*backend, 6, 40, 8, 13));  // rows that begin within a word
}

TEST(BenchCheckTest, BoundsAndFailures) {
  ResultCheck check;
  EXPECT_FALSE(check.passed());  // nothing compared
  check.within(1.5, 1, 1, "y", 0);
  check.equal(3, 3, "id", 1);
  EXPECT_TRUE(check.passed());
  EXPECT_EQ(check.max_error_over_bound(), 0.5);
  EXPECT_EQ(check.num_compared(), 2);
  EXPECT_EQ(check.failure(), "");
  check.within(1, 1, 0, "y", 2);
  EXPECT_TRUE(check.passed());
  check.within(4, 1, 1, "y", 3);
  check.within(std::numeric_limits<double>::quiet_NaN(), 1, 1, "y", 4);
  check.equal(3, 4, "id", 5);
  EXPECT_FALSE(check.passed());
  EXPECT_NE(check.failure().find("3 of 6"), std::string::npos) << check.failure();
  EXPECT_NE(check.failure().find("y 3: got 4, expected 1 +- 1"), std::string::npos);
}

// Few roundings count in full; many are held to what is likely, far below the result's own size.
TEST(BenchCheckTest, BoundsOfProducts) {
  const BoundedValue one = bounded_dot({3}, {{-2, 0.25}});
  EXPECT_EQ(one.value, -6);
  EXPECT_EQ(one.error, 0.75 + 1.01 * 2 * kFloatRound * 3 * 2.25);
  constexpr std::int64_t kTerms = 7168;
  BenchRandom random(1);
  std::vector<double> weights;
  std::vector<BoundedValue> x;
  for (std::int64_t i = 0; i < kTerms; ++i) {
    weights.push_back(random.uniform(-1, 1));
    const double value = random.uniform(-1, 1);
    x.push_back({value, store_error(DType::kBFloat16, value)});
  }
  const double size = std::sqrt(static_cast<double>(kTerms)) / 3;  // standard deviation of the sum
  EXPECT_LT(bounded_dot(weights, x).error, 0.05 * size);
}

TEST(BenchCheckTest, SamplesHoldBothEnds) {
  EXPECT_EQ(sample_places(0, 3), (std::vector<std::int64_t>{}));
  EXPECT_EQ(sample_places(1, 3), (std::vector<std::int64_t>{0}));
  EXPECT_EQ(sample_places(2, 3), (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(sample_places(100, 3), (std::vector<std::int64_t>{0, 49, 99}));
}

// The shapes that a benchmark is given by name.
TEST(KernelBenchTest, ModelConfigsParse) {
  const ModelConfig kimi = read_model_config("kimi-k2.6.json");
  EXPECT_EQ(kimi.hidden_size, 7168);
  EXPECT_EQ(kimi.n_routed_experts, 384);
  EXPECT_EQ(kimi.num_experts_per_tok, 8);
  EXPECT_EQ(kimi.num_attention_heads, 64);
  EXPECT_EQ(kimi.vocab_size, 163840);
  EXPECT_EQ(kimi.quantization->group_size, 32);
  EXPECT_EQ(kimi.rms_norm_eps, 1e-5);
  EXPECT_TRUE(kimi.rope.yarn);
  EXPECT_EQ(read_model_config("tiny.json").n_routed_experts, 16);
}

// Every case of every kernel at small sizes, also as one rank of several: all are right.
TEST(KernelBenchTest, EveryCaseOfATinyModelIsRight) {
  const ModelConfig config = read_model_config("tiny.json");
  const auto backend = make_backend({.name = "cpu"});
  for (const std::int64_t num_ranks : {1, 3}) {
    KernelBenchOptions options;
    options.num_ranks = num_ranks;
    options.rows = {1, 3};
    options.prefixes = {0, 33};
    options.repeats = 1;
    options.working_set_bytes = 100000;
    options.histogram = num_ranks == 1 ? ExpertHistogram::kUniform : ExpertHistogram::kOne;
    std::set<std::string> kernels;
    const std::int64_t num_wrong = run_kernel_bench(
        *backend, config, options,
        [&](const KernelResult& result) {
          kernels.insert(result.kernel);
          EXPECT_GT(result.num_compared, 0) << result.kernel;
          EXPECT_LE(result.max_error_over_bound, 1) << result.kernel;
        },
        [](const std::string& text) { ADD_FAILURE() << text; });
    EXPECT_EQ(num_wrong, 0);
    EXPECT_EQ(kernels.size(), bench_kernel_names().size() + 1) << "one and the plain read";
  }
}

}  // namespace
}  // namespace kdtree
