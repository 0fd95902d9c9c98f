#include "engine/near_tie.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace kdtree {

namespace {

constexpr double kRoundingsALayer = 8;
constexpr double kDeviations = 4;

// z with P(normal value > z) = share, by bisection: the tail falls with z.
double upper_quantile(double share) {
  double low = -40;
  double high = 40;
  while (high - low > 1e-12) {
    const double middle = (low + high) / 2;
    const double tail = std::erfc(middle / std::numbers::sqrt2) / 2;
    (tail > share ? low : high) = middle;
  }
  return low;
}

// f of the bound, for the error r in front of the routers.
double router_error(double r, const ModelConfig& config) {
  const auto experts = static_cast<double>(config.n_routed_experts);
  const auto chosen = static_cast<double>(config.num_experts_per_tok);
  if (config.n_routed_experts <= config.num_experts_per_tok) {
    return 0;  // no experts, or all of them
  }
  const auto moe_layers = static_cast<double>(config.num_moe_layers());
  const double z = upper_quantile(chosen / experts);
  const double density = std::exp(-z * z / 2) / std::sqrt(2 * std::numbers::pi);
  const double distance = 1 / (experts * density);
  const double swap = std::min(1.0, 2 * r / (std::sqrt(std::numbers::pi) * distance));
  if (moe_layers * swap < std::erfc(kDeviations / std::numbers::sqrt2)) {
    return 0;
  }
  const auto layers = static_cast<double>(config.num_hidden_layers);
  return std::sqrt(moe_layers * swap / layers) / chosen;
}

}  // namespace

double near_tie_share(DType dtype, const ModelConfig& config) {
  const double unit_roundoff = dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-24;
  const double roundings = kRoundingsALayer * static_cast<double>(config.num_hidden_layers) + 1;
  const double rounding = unit_roundoff * std::sqrt(roundings / 3);
  const double error = std::hypot(rounding, router_error(rounding, config));
  // Two tokens are the smallest vocabulary that has a choice.
  const double tokens = std::max(2.0, static_cast<double>(config.vocab_size));
  return kDeviations * std::numbers::sqrt2 * error / std::sqrt(2 * std::log(tokens));
}

double near_tie_margin(const ChoiceLogits& choice, double share) {
  const double distance = double{choice.best} - double{choice.second};
  if (distance <= 0) {
    return 0;
  }
  const double bound = share * std::abs(double{choice.best});
  const double infinity = std::numeric_limits<double>::infinity();
  return distance < bound ? distance / bound : infinity;
}

}  // namespace kdtree
