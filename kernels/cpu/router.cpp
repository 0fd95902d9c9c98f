#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scalar_math.h"
#include "kernels/cpu/shapes.h"

namespace kdtree {
namespace {

struct Scratch {
  std::vector<float> scores;  // [experts] what becomes the weights
  std::vector<float> choice;  // [experts] what decides: biased, masked, never NaN
  std::vector<float> groups;  // [groups]
  std::vector<char> taken;    // [experts] or [groups]
};

// Index of the best value not taken yet, the lowest of equals. One must be left.
std::size_t take_best(const std::vector<float>& values, std::vector<char>& taken) {
  std::size_t best = values.size();
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (taken[i] == 0 && (best == values.size() || values[i] > values[best])) {
      best = i;
    }
  }
  taken[best] = 1;
  return best;
}

void score(const RouterParams& params, const float* logits, std::vector<float>& scores) {
  if (params.scoring == RouterScoring::kSigmoid) {
    std::transform(logits, logits + scores.size(), scores.begin(), sigmoid);
    return;
  }
  const float highest = *std::max_element(logits, logits + scores.size());
  float sum = 0;
  for (std::size_t e = 0; e < scores.size(); ++e) {
    scores[e] = std::exp(logits[e] - highest);
    sum += scores[e];
  }
  for (float& value : scores) {
    value /= sum;
  }
}

// What a group is judged by.
float group_score(RouterMethod method, const float* choice, std::size_t size) {
  float best = kMinusInfinity;
  float second = kMinusInfinity;
  for (std::size_t i = 0; i < size; ++i) {
    second = std::max(second, std::min(best, choice[i]));
    best = std::max(best, choice[i]);
  }
  return method == RouterMethod::kNoAuxTc && size > 1 ? best + second : best;
}

// Sets the choice of experts outside the best topk_group groups to -infinity.
void mask_groups(const RouterParams& params, Scratch& scratch) {
  const auto num_groups = static_cast<std::size_t>(params.n_group);
  const std::size_t size = scratch.choice.size() / num_groups;
  scratch.groups.resize(num_groups);
  for (std::size_t g = 0; g < num_groups; ++g) {
    scratch.groups[g] = group_score(params.method, scratch.choice.data() + g * size, size);
  }
  scratch.taken.assign(num_groups, 0);
  for (std::int64_t i = 0; i < params.topk_group; ++i) {
    take_best(scratch.groups, scratch.taken);
  }
  for (std::size_t g = 0; g < num_groups; ++g) {
    if (scratch.taken[g] == 0) {
      std::fill_n(scratch.choice.begin() + static_cast<std::ptrdiff_t>(g * size), size,
                  kMinusInfinity);
    }
  }
}

void route_row(const RouterParams& params, std::int64_t row, Scratch& scratch) {
  const auto num_experts = static_cast<std::size_t>(params.logits.size(1));
  const std::int64_t k = params.expert_ids.size(1);
  scratch.scores.resize(num_experts);
  scratch.choice.resize(num_experts);
  score(params, params.logits.row<float>(row), scratch.scores);
  const bool biased = params.method == RouterMethod::kNoAuxTc && !params.correction_bias.empty();
  for (std::size_t e = 0; e < num_experts; ++e) {
    const float bias = biased ? params.correction_bias.data<float>()[e] : 0.0F;
    scratch.choice[e] = nan_to_minus_infinity(scratch.scores[e] + bias);
  }
  if (params.method != RouterMethod::kGreedy && params.n_group > 1) {
    mask_groups(params, scratch);
  }
  scratch.taken.assign(num_experts, 0);
  auto* ids = params.expert_ids.row<std::int32_t>(row);
  auto* weights = params.expert_weights.row<float>(row);
  float sum = 0;
  for (std::int64_t i = 0; i < k; ++i) {
    const std::size_t expert = take_best(scratch.choice, scratch.taken);
    ids[i] = static_cast<std::int32_t>(expert);
    weights[i] = scratch.scores[expert];  // without the bias, which only chooses
    sum += weights[i];
  }
  for (std::int64_t i = 0; i < k; ++i) {
    if (params.norm_topk_prob) {
      weights[i] /= sum + 1e-20F;
    }
    if (params.scale_always || !params.norm_topk_prob) {
      weights[i] *= params.routed_scaling_factor;
    }
  }
}

}  // namespace

void CpuBackend::router(const RouterParams& params) {
  expect_matrix("router's logits", params.logits, DType::kFloat32);
  expect_matrix("expert_ids", params.expert_ids, DType::kInt32);
  const std::int64_t rows = params.logits.size(0);
  const std::int64_t num_experts = params.logits.size(1);
  const std::int64_t k = params.expert_ids.size(1);
  expect_tensor("expert_ids", params.expert_ids, DType::kInt32, Shape{rows, k});
  expect_tensor("expert_weights", params.expert_weights, DType::kFloat32, Shape{rows, k});
  if (!params.correction_bias.empty()) {
    expect_tensor("correction_bias", params.correction_bias, DType::kFloat32, Shape{num_experts});
  }
  check(k <= num_experts, "num_experts_per_tok {} of {} n_routed_experts", k, num_experts);
  check(params.n_group >= 1 && num_experts % params.n_group == 0,
        "n_group {} does not divide n_routed_experts {}", params.n_group, num_experts);
  check(params.topk_group >= 1 && params.topk_group <= params.n_group,
        "topk_group {} of n_group {}", params.topk_group, params.n_group);
  if (num_experts == 0) {
    return;
  }
  const LoopWork work = {rows, rows * num_experts * (kExpWork + k)};
  parallel_for(num_threads_, work, [&](std::int64_t begin, std::int64_t end) {
    thread_local Scratch scratch;
    for (std::int64_t r = begin; r < end; ++r) {
      route_row(params, r, scratch);
    }
  });
}

}  // namespace kdtree
