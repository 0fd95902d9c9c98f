#include "kernels/cpu/attention.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/exp_lanes.h"
#include "kernels/cpu/lanes.h"

namespace kdtree {
namespace {

// Keys taken at a time; changes no bits.
constexpr int kTileKeys = 4;

KDTREE_SIMD_CLONES
void score_keys(const HeadCache& cache, const HeadQuery& head, float* scores) {
  const std::span<const std::int32_t> visible = head.visible;
  const std::size_t count = visible.size();
  const float* const queries[1] = {head.query};
  for (std::size_t j = 0; j < count; j += kTileKeys) {
    const std::size_t tile = std::min<std::size_t>(kTileKeys, count - j);
    const float* keys[kTileKeys];
    for (std::size_t t = 0; t < kTileKeys; ++t) {
      // A broken tile computes its last key again and drops it.
      keys[t] = cache.keys + visible[j + std::min(t, tile - 1)] * cache.stride;
    }
    Lanes sums[kTileKeys] = {};
    accumulate_dots<1, kTileKeys>(queries, keys, cache.key_dim, sums);
    for (std::size_t t = 0; t < tile; ++t) {
      scores[j + t] = sum_lanes(sums[t]) * head.scale;
    }
  }
}

KDTREE_SIMD_CLONES
void add_values(const HeadCache& cache, std::span<const std::int32_t> visible, const float* weights,
                float* output) {
  const std::size_t count = visible.size();
  std::size_t j = 0;
  for (; j + kTileKeys <= count; j += kTileKeys) {
    const float* values[kTileKeys];
    for (std::size_t t = 0; t < kTileKeys; ++t) {
      values[t] = cache.values + visible[j + t] * cache.stride;
    }
    add_scaled<kTileKeys>(weights + j, values, cache.value_dim, output);
  }
  for (; j < count; ++j) {
    const float* const values[1] = {cache.values + visible[j] * cache.stride};
    add_scaled<1>(weights + j, values, cache.value_dim, output);
  }
}

// Turns scores into weights exp(score - the highest score) and returns their sum; weight j belongs
// to lane j % 8.
KDTREE_SIMD_CLONES
float weigh(float* scores, std::int64_t count) {
  const float highest = largest(scores, count);
  Lanes sum = {};
  std::int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    Lanes weights;
    load_lanes(scores + j, weights);
    weights -= highest;
    exp_lanes(weights);
    store_lanes(weights, scores + j);
    sum += weights;
  }
  if (j < count) {
    Lanes weights;
    load_lanes(scores + j, count - j, weights);
    weights -= highest;
    exp_lanes(weights);
    std::memcpy(scores + j, &weights, static_cast<std::size_t>(count - j) * sizeof(float));
    load_lanes(scores + j, count - j, weights);  // zeros behind the last one
    sum += weights;
  }
  return sum_lanes(sum);
}

}  // namespace

void attend(const HeadCache& cache, const HeadQuery& head, float* scores, float* output) {
  const std::span<const std::int32_t> visible = head.visible;
  std::fill_n(output, cache.value_dim, 0.0F);
  if (visible.empty()) {
    return;
  }
  score_keys(cache, head, scores);
  const float sum = weigh(scores, std::ssize(visible));
  add_values(cache, visible, scores, output);
  for (std::int64_t c = 0; c < cache.value_dim; ++c) {
    output[c] /= sum;
  }
}

}  // namespace kdtree
