#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/check.h"

namespace kdtree {

namespace {

double mscale(double factor, double strength) {
  return factor <= 1 ? 1.0 : 0.1 * strength * std::log(factor) + 1.0;
}

// The pair index whose wave turns `rotations` times over the original context.
double correction_dim(double rotations, const RopeConfig& rope, std::int64_t rope_dim) {
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  return static_cast<double>(rope_dim) * std::log(original / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(rope.rope_theta));
}

}  // namespace

std::vector<double> rope_inverse_frequencies(const RopeConfig& rope, std::int64_t rope_dim) {
  const std::int64_t pairs = rope_dim / 2;
  std::vector<double> frequencies(static_cast<std::size_t>(pairs));
  double low = 0;
  double high = 0;
  if (rope.yarn) {
    low = std::max(std::floor(correction_dim(rope.beta_fast, rope, rope_dim)), 0.0);
    high = std::min(std::ceil(correction_dim(rope.beta_slow, rope, rope_dim)),
                    static_cast<double>(rope_dim - 1));
    if (low == high) {
      high += 0.001;  // the reference's guard against dividing by zero
    }
  }
  for (std::int64_t i = 0; i < pairs; ++i) {
    const double plain =
        std::pow(rope.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(rope_dim));
    double value = plain;
    if (rope.yarn) {
      const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
      value = plain * (1 - ramp) + plain / rope.factor * ramp;
    }
    frequencies[static_cast<std::size_t>(i)] = value;
  }
  return frequencies;
}

double rope_amplitude(const RopeConfig& rope) {
  if (!rope.yarn) {
    return 1;
  }
  if (rope.attention_factor) {
    return *rope.attention_factor;
  }
  return mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim);
}

void override_rope_amplitude(RopeConfig& rope, double amplitude, const std::string& origin) {
  require_input(rope.yarn,
                "{}: the rotary amplitude cannot be set to {}: the config has no YaRN "
                "rope_scaling, and its amplitude is 1",
                origin, amplitude);
  rope.attention_factor = amplitude;
}

double softmax_scale(const RopeConfig& rope, std::int64_t head_dim) {
  const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
  if (!rope.yarn || rope.mscale_all_dim == 0) {
    return scale;
  }
  const double m = mscale(rope.factor, rope.mscale_all_dim);
  return scale * m * m;
}

std::vector<float> rope_table(const RopeConfig& rope, std::int64_t rope_dim,
                              std::int64_t num_positions) {
  const std::vector<double> frequencies = rope_inverse_frequencies(rope, rope_dim);
  const double amplitude = rope_amplitude(rope);
  const auto pairs = static_cast<std::size_t>(rope_dim / 2);
  std::vector<float> table(static_cast<std::size_t>(num_positions) * pairs * 2);
  for (std::int64_t position = 0; position < num_positions; ++position) {
    float* row = table.data() + static_cast<std::size_t>(position) * pairs * 2;
    for (std::size_t i = 0; i < pairs; ++i) {
      const double angle = static_cast<double>(position) * frequencies[i];
      row[i] = static_cast<float>(std::cos(angle) * amplitude);
      row[pairs + i] = static_cast<float>(std::sin(angle) * amplitude);
    }
  }
  return table;
}

}  // namespace kdtree
