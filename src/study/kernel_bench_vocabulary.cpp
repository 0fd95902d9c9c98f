// From logits to candidates: the best of a rank's part, its log-sum-exp, the parts put together.
#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "core/partition.h"
#include "study/bench_data.h"
#include "study/kernel_bench_cases.h"

namespace kdtree {

namespace {

constexpr std::int64_t kSampledVocabularyRows = 3;
constexpr double kLargestLogit = 16;

struct Logits {
  std::vector<float> values;  // [max rows, cols]
  std::int64_t cols = 0;
  DeviceTensor tensor;  // the same in float32

  std::span<const float> row(std::int64_t index) const {
    return std::span(values).subspan(static_cast<std::size_t>(index * cols),
                                     static_cast<std::size_t>(cols));
  }
};

using Candidates = std::vector<std::pair<float, std::int32_t>>;

// The k best of a row, best first, ties to the lower id.
Candidates best_of(std::span<const float> logits, std::int64_t k) {
  Candidates all;
  for (const float logit : logits) {
    all.emplace_back(logit, static_cast<std::int32_t>(all.size()));
  }
  const auto better = [](const auto& a, const auto& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  };
  const auto count = std::min(k, static_cast<std::int64_t>(all.size()));
  std::partial_sort(all.begin(), all.begin() + count, all.end(), better);
  all.resize(static_cast<std::size_t>(count));
  return all;
}

// Nearly normal, as logits are: sums of four uniform numbers.
std::vector<float> make_logits(const BenchContext& context, std::int64_t count) {
  BenchRandom random(context.seed("logits"));
  std::vector<float> logits(static_cast<std::size_t>(count));
  for (float& logit : logits) {
    for (int term = 0; term < 4; ++term) {
      logit += static_cast<float>(random.uniform(-kLargestLogit / 4, kLargestLogit / 4));
    }
  }
  return logits;
}

void bench_top_k(const BenchContext& context, const Logits& logits, std::int64_t k) {
  Backend& backend = context.backend;
  for (const std::int64_t rows : context.options.rows) {
    const ConstTensorView input = logits.tensor.rows(rows);
    const DeviceTensor values(backend, DType::kFloat32, Shape{rows, k});
    const DeviceTensor ids(backend, DType::kInt32, Shape{rows, k});
    context.measure(
        {.kernel = "top_k",
         .shape = {{"vocabulary_part", logits.cols}, {"k", k}},
         .rows = rows,
         .activation_bytes = input.bytes() + values.bytes() + ids.bytes(),
         .run = [&](std::int64_t) { backend.top_k(input, 0, values.view(), ids.view()); },
         .check =
             [&] {
               const std::vector<std::int32_t> got_ids = download_indices(backend, ids.view());
               ResultCheck check;
               for (const std::int64_t row : sample_places(rows, kSampledVocabularyRows)) {
                 const Candidates want = best_of(logits.row(row), k);
                 const std::vector<float> got = download_rows(backend, values.view(), row, 1);
                 for (std::size_t i = 0; i < want.size(); ++i) {
                   const std::int64_t place = row * k + static_cast<std::int64_t>(i);
                   check.equal(got_ids[static_cast<std::size_t>(place)], want[i].second, "id",
                               place);
                   check.within(got[i], want[i].first, 0, "value", place);
                 }
               }
               return check;
             }});
  }
}

// Sum of n exponentials: the difference rounds once, which exp turns into a relative error of
// |x - m| u; exp itself 2 u; at most n additions.
void bench_log_sum_exp(const BenchContext& context, const Logits& logits) {
  Backend& backend = context.backend;
  for (const std::int64_t rows : context.options.rows) {
    const ConstTensorView input = logits.tensor.rows(rows);
    const DeviceTensor partials(backend, DType::kFloat32, Shape{rows, 2});
    context.measure(
        {.kernel = "log_sum_exp_partials",
         .shape = {{"vocabulary_part", logits.cols}},
         .rows = rows,
         .activation_bytes = input.bytes() + partials.bytes(),
         .run = [&](std::int64_t) { backend.log_sum_exp_partials(input, partials.view()); },
         .check =
             [&] {
               ResultCheck check;
               for (const std::int64_t row : sample_places(rows, kSampledVocabularyRows)) {
                 const std::span<const float> input_row = logits.row(row);
                 const float highest = *std::max_element(input_row.begin(), input_row.end());
                 double sum = 0;
                 for (const float logit : input_row) {
                   sum += std::exp(static_cast<double>(logit) - highest);
                 }
                 const std::vector<float> got = download_rows(backend, partials.view(), row, 1);
                 const double roundings = 2 * kLargestLogit + 2 + static_cast<double>(logits.cols);
                 check.within(got[0], highest, 0, "highest logit of row", row);
                 check.within(got[1], sum, 1.01 * roundings * kFloatRound * sum, "sum of row", row);
               }
               return check;
             }});
  }
}

// Candidates of all parts, as the ranks' top_k and log_sum_exp_partials give them.
struct Parts {
  std::int64_t count = 1;
  std::int64_t k = 1;
  std::vector<float> values;      // [parts, rows, k]
  std::vector<std::int32_t> ids;  // [parts, rows, k]
  std::vector<float> partials;    // [parts, rows, 2]
};

Parts make_parts(const BenchContext& context, std::int64_t rows, std::int64_t k) {
  BenchRandom random(context.seed("merge_top_k"));
  Parts parts{.count = context.options.num_ranks, .k = k, .values = {}, .ids = {}, .partials = {}};
  for (std::int64_t p = 0; p < parts.count; ++p) {
    const Range part = partition(context.config.vocab_size, parts.count, p);
    for (std::int64_t r = 0; r < rows; ++r) {
      std::vector<float> best = random.floats(k, -kLargestLogit, kLargestLogit, DType::kFloat32);
      std::sort(best.begin(), best.end(), std::greater<>());
      for (std::int64_t i = 0; i < k; ++i) {
        const bool there = i < part.size();
        parts.values.push_back(best[static_cast<std::size_t>(i)]);
        parts.ids.push_back(there ? static_cast<std::int32_t>(part.begin + i) : -1);
      }
      parts.partials.push_back(best[0]);
      parts.partials.push_back(static_cast<float>(random.uniform(1, 50)));
    }
  }
  return parts;
}

// Log-probabilities: the parts' sums meet by an exponential of a difference, a product and an
// addition each, (2 * 16 + 2 + parts) u, which the logarithm makes absolute; its own rounding and
// those of the value, m and the logit are relative to their sizes.
ResultCheck check_merge(const Parts& parts, const std::vector<std::int32_t>& ids,
                        const std::vector<float>& values, std::int64_t rows) {
  ResultCheck check;
  for (const std::int64_t row : sample_places(rows, kSampledVocabularyRows)) {
    Candidates all;
    double highest = -kLargestLogit;
    for (std::int64_t p = 0; p < parts.count; ++p) {
      const auto first = static_cast<std::size_t>((p * rows + row) * parts.k);
      for (std::size_t i = first; i < first + static_cast<std::size_t>(parts.k); ++i) {
        if (parts.ids[i] >= 0) {
          all.emplace_back(-parts.values[i], parts.ids[i]);
        }
      }
      highest =
          std::max<double>(highest, parts.partials[static_cast<std::size_t>(p * rows + row) * 2]);
    }
    std::sort(all.begin(), all.end());
    double sum = 0;
    for (std::int64_t p = 0; p < parts.count; ++p) {
      const auto place = static_cast<std::size_t>(p * rows + row) * 2;
      sum += std::exp(parts.partials[place] - highest) * parts.partials[place + 1];
    }
    const double log_sum = highest + std::log(sum);
    for (std::int64_t i = 0; i < parts.k && i < static_cast<std::int64_t>(all.size()); ++i) {
      const std::int64_t place = row * parts.k + i;
      const auto& [negative, id] = all[static_cast<std::size_t>(i)];
      const double sizes = 2 * (std::abs(highest) + std::abs(negative) + 2 * std::log(sum));
      const double roundings = 2 * (2 * kLargestLogit + 2) + static_cast<double>(2 * parts.count);
      check.equal(ids[static_cast<std::size_t>(place)], id, "id", place);
      check.within(values[static_cast<std::size_t>(place)], -negative - log_sum,
                   1.01 * (roundings + sizes) * kFloatRound, "log-probability", place);
    }
  }
  return check;
}

void bench_merge(const BenchContext& context, std::int64_t k) {
  Backend& backend = context.backend;
  for (const std::int64_t rows : context.options.rows) {
    const Parts parts = make_parts(context, rows, k);
    const Shape shape{parts.count, rows, k};
    const DeviceTensor part_values = upload_floats(backend, DType::kFloat32, shape, parts.values);
    const DeviceTensor part_ids = upload_indices(backend, shape, parts.ids);
    const DeviceTensor partials =
        upload_floats(backend, DType::kFloat32, Shape{parts.count, rows, 2}, parts.partials);
    const DeviceTensor values(backend, DType::kFloat32, Shape{rows, k});
    const DeviceTensor ids(backend, DType::kInt32, Shape{rows, k});
    context.measure({.kernel = "merge_top_k",
                     .shape = {{"parts", parts.count}, {"k", k}},
                     .rows = rows,
                     .activation_bytes = part_values.bytes() + part_ids.bytes() + partials.bytes() +
                                         values.bytes() + ids.bytes(),
                     .run =
                         [&](std::int64_t) {
                           backend.merge_top_k(part_values.view(), part_ids.view(), partials.view(),
                                               values.view(), ids.view());
                         },
                     .check =
                         [&] {
                           return check_merge(parts, download_indices(backend, ids.view()),
                                              download_rows(backend, values.view(), 0, rows), rows);
                         }});
  }
}

}  // namespace

void bench_vocabulary(const BenchContext& context) {
  Backend& backend = context.backend;
  Logits logits;
  logits.cols = context.partition.vocabulary.size();
  if (logits.cols == 0) {
    return;
  }
  if (context.wants("top_k") || context.wants("log_sum_exp_partials")) {
    logits.values = make_logits(context, context.max_rows() * logits.cols);
    logits.tensor = upload_floats(backend, DType::kFloat32, Shape{context.max_rows(), logits.cols},
                                  logits.values);
  }
  // Verification wants the best one, a drafter's tree as many as its budget.
  for (const std::int64_t k : {1, 16}) {
    if (context.wants("top_k")) {
      bench_top_k(context, logits, k);
    }
    if (context.wants("merge_top_k")) {
      bench_merge(context, k);
    }
  }
  if (context.wants("log_sum_exp_partials")) {
    bench_log_sum_exp(context, logits);
  }
}

}  // namespace kdtree
