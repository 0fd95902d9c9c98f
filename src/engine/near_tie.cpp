#include "engine/near_tie.h"

#include <algorithm>
#include <cmath>

namespace kdtree {

namespace {

constexpr double kRoundingsALayer = 8;
constexpr double kDeviations = 4;

}  // namespace

double near_tie_share(DType dtype, std::int64_t num_hidden_layers, std::int64_t vocab_size) {
  const double unit_roundoff = dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-24;
  const double roundings = kRoundingsALayer * static_cast<double>(num_hidden_layers) + 1;
  const double stream_error = unit_roundoff * std::sqrt(roundings / 3);
  // Two tokens are the smallest vocabulary that has a choice.
  const double tokens = std::max(2.0, static_cast<double>(vocab_size));
  return kDeviations * std::sqrt(2.0) * stream_error / std::sqrt(2 * std::log(tokens));
}

bool is_near_tie(const ChoiceLogits& choice, double share) {
  const double distance = double{choice.best} - double{choice.second};
  return distance <= 0 || distance < share * std::abs(double{choice.best});
}

}  // namespace kdtree
