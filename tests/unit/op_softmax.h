// Softmax attention of one head in double precision, with the error that float32 may make.
#pragma once

#include <cmath>
#include <functional>
#include <vector>

#include "tests/unit/op_compare.h"

namespace kdtree::ops_test {

struct ReferenceHead {
  std::int64_t num_keys = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  double scale = 1;
  double weight_error = 0;  // relative, of storing a softmax weight: 2^-9 for bf16
  const float* query = nullptr;
  std::function<const float*(std::int64_t)> key;  // of the j-th visible key
  std::function<const float*(std::int64_t)> value;
};

// Appends the head's value_dim results. With u = 2^-24 and K keys, to first order:
// - A score s_j, of key_dim products and the scale, is off by at most
//   e = (key_dim + 1) u max_j sum |scale q k|.
// - A weight exp(s_j - m) is off by a factor within 1 +- eta: the scores of j and of the maximum by
//   e each, their difference by one rounding, exp itself by 2 u.
// - Numerator and denominator add K terms each, K u apiece, and the denominator has the weights'
//   error too. The product with the value and the quotient round once each:
//   |error| <= (2 eta + (2 K + 2) u) sum_j p_j |v_j|.
// 5 % covers second order.
inline void add_attention(const ReferenceHead& head,
                          const std::function<double(double)>& store_error, Expected& want) {
  std::vector<double> scores;
  double score_error = 0;
  for (std::int64_t j = 0; j < head.num_keys; ++j) {
    const float* key = head.key(j);
    double sum = 0;
    double magnitude = 0;
    for (std::int64_t i = 0; i < head.key_dim; ++i) {
      const double product = head.scale * head.query[i] * key[i];
      sum += product;
      magnitude += std::abs(product);
    }
    scores.push_back(sum);
    score_error = std::max(score_error, static_cast<double>(head.key_dim + 1) * kRound * magnitude);
  }
  const double highest = *std::max_element(scores.begin(), scores.end());
  const double lowest = *std::min_element(scores.begin(), scores.end());
  const double eta = 2 * score_error + (highest - lowest) * kRound + 2 * kRound;
  double total = 0;
  for (double& score : scores) {
    score = std::exp(score - highest);
    total += score;
  }
  const double relative =
      2 * eta + (2 * static_cast<double>(head.num_keys) + 2) * kRound + head.weight_error;
  std::vector<double> sums(static_cast<std::size_t>(head.value_dim));
  std::vector<double> magnitudes(sums.size());
  for (std::int64_t j = 0; j < head.num_keys; ++j) {
    const float* value = head.value(j);
    const double weight = scores[static_cast<std::size_t>(j)] / total;
    for (std::size_t c = 0; c < sums.size(); ++c) {
      sums[c] += weight * value[c];
      magnitudes[c] += std::abs(weight * value[c]);
    }
  }
  for (std::size_t c = 0; c < sums.size(); ++c) {
    want.add(sums[c], 1.05 * relative * magnitudes[c] + store_error(sums[c]));
  }
}

}  // namespace kdtree::ops_test
