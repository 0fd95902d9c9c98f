// The router's choice of experts: one warp a row.
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/shapes.h"

namespace kdtree {
namespace {

constexpr int kWarpThreads = 32;
constexpr unsigned kAllLanes = 0xffffffffU;
constexpr int kMostExperts = 1024;

struct RouterArrays {
  const float* logits;
  std::int64_t logits_stride;
  const float* bias;  // or null
  std::int32_t num_experts;
  std::int32_t num_groups;  // 1: no groups
  std::int32_t topk_group;
  std::int32_t k;
  bool softmax;
  bool sum_of_two;  // groups are judged by the sum of their two best
  bool normalise;
  bool scale;
  float scaling_factor;
  std::int32_t* ids;
  std::int64_t ids_stride;
  float* weights;
  std::int64_t weights_stride;
};

constexpr std::uint32_t kTaken = 0;  // below the key of every value

// Unsigned order of the keys = order of the values; NaN counts as -infinity, -0.0 equals 0.0.
__device__ std::uint32_t ordered_key(float value) {
  if (isnan(value)) {
    value = -INFINITY;
  }
  const std::uint32_t bits = value == 0.0F ? 0U : __float_as_uint(value);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
}

__device__ float warp_sum(float value) {
  for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

// Takes the best of `count` keys in shared memory again and again, the lowest index of equals. A
// lane keeps the best of its own ones: lane, lane + 32, ...
class Taker {
 public:
  __device__ Taker(std::uint32_t* keys, int count, int lane)
      : keys_(keys), count_(count), lane_(lane) {
    look();
  }

  // For the whole warp; one key must be left.
  __device__ int take() {
    const std::uint32_t key = __reduce_max_sync(kAllLanes, best_key_);
    const unsigned index = __reduce_min_sync(
        kAllLanes, best_key_ == key ? static_cast<unsigned>(best_index_) : kAllLanes);
    const int taken = static_cast<int>(index);
    if (taken % kWarpThreads == lane_) {
      keys_[taken] = kTaken;
      look();
    }
    return taken;
  }

 private:
  __device__ void look() {
    best_key_ = kTaken;
    best_index_ = lane_;
    for (int i = lane_; i < count_; i += kWarpThreads) {
      const std::uint32_t key = keys_[i];
      if (key > best_key_) {
        best_key_ = key;
        best_index_ = i;
      }
    }
  }

  std::uint32_t* keys_;
  int count_;
  int lane_;
  std::uint32_t best_key_ = kTaken;
  int best_index_ = 0;
};

// What a group is judged by.
__device__ float group_score(const float* choice, int size, bool sum_of_two) {
  float best = -INFINITY;
  float second = -INFINITY;
  for (int i = 0; i < size; ++i) {
    second = fmaxf(second, fminf(best, choice[i]));
    best = fmaxf(best, choice[i]);
  }
  return sum_of_two && size > 1 ? best + second : best;
}

__global__ void __launch_bounds__(kWarpThreads) router_kernel(RouterArrays arrays) {
  __shared__ float scores[kMostExperts];        // what becomes the weights
  __shared__ float choice[kMostExperts];        // what decides: biased, never NaN
  __shared__ std::uint32_t keys[kMostExperts];  // of the choice
  __shared__ std::uint32_t group_keys[kMostExperts];
  const int lane = static_cast<int>(threadIdx.x);
  const std::int64_t row = blockIdx.x;
  const int num_experts = arrays.num_experts;
  const float* logits = arrays.logits + row * arrays.logits_stride;
  std::int32_t* ids = arrays.ids + row * arrays.ids_stride;
  float* weights = arrays.weights + row * arrays.weights_stride;

  float highest = -INFINITY;
  float sum = 0;
  if (arrays.softmax) {
    for (int e = lane; e < num_experts; e += kWarpThreads) {
      highest = fmaxf(highest, logits[e]);
    }
    for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, offset));
    }
    for (int e = lane; e < num_experts; e += kWarpThreads) {
      const float value = expf(logits[e] - highest);
      scores[e] = value;  // read again by this lane only
      sum += value;
    }
    sum = warp_sum(sum);
  }
  for (int e = lane; e < num_experts; e += kWarpThreads) {
    const float score = arrays.softmax ? scores[e] / sum : 1.0F / (1.0F + expf(-logits[e]));
    const float biased = score + (arrays.bias != nullptr ? arrays.bias[e] : 0.0F);
    scores[e] = score;
    choice[e] = isnan(biased) ? -INFINITY : biased;
    keys[e] = ordered_key(biased);
  }
  __syncwarp();

  if (arrays.num_groups > 1) {
    const int size = num_experts / arrays.num_groups;
    for (int g = lane; g < arrays.num_groups; g += kWarpThreads) {
      group_keys[g] = ordered_key(group_score(choice + g * size, size, arrays.sum_of_two));
    }
    __syncwarp();
    Taker groups(group_keys, arrays.num_groups, lane);
    for (int i = 0; i < arrays.topk_group; ++i) {
      groups.take();
    }
    __syncwarp();
    for (int e = lane; e < num_experts; e += kWarpThreads) {
      if (group_keys[e / size] != kTaken) {
        keys[e] = ordered_key(-INFINITY);
      }
    }
    __syncwarp();
  }

  Taker experts(keys, num_experts, lane);
  float chosen_sum = 0;
  for (int i = 0; i < arrays.k; ++i) {
    const int expert = experts.take();
    const float weight = scores[expert];  // without the bias, which only chooses
    chosen_sum += weight;
    if (lane == 0) {
      ids[i] = expert;
      weights[i] = weight;
    }
  }
  __syncwarp();
  for (int i = lane; i < arrays.k; i += kWarpThreads) {
    float weight = weights[i];
    if (arrays.normalise) {
      weight /= chosen_sum + 1e-20F;
    }
    if (arrays.scale) {
      weight *= arrays.scaling_factor;
    }
    weights[i] = weight;
  }
}

}  // namespace

void CudaBackend::router(const RouterParams& params) {
  expect_matrix("router's logits", params.logits, DType::kFloat32);
  expect_matrix("expert_ids", params.expert_ids, DType::kInt32);
  const std::int64_t rows = params.logits.size(0);
  const std::int64_t num_experts = params.logits.size(1);
  const std::int64_t k = params.expert_ids.size(1);
  expect_tensor("expert_ids", params.expert_ids, DType::kInt32, Shape{rows, k});
  expect_tensor("expert_weights", params.expert_weights, DType::kFloat32, Shape{rows, k});
  if (!params.correction_bias.empty()) {
    expect_tensor("correction_bias", params.correction_bias, DType::kFloat32, Shape{num_experts});
    check(params.correction_bias.contiguous(), "correction_bias must be contiguous");
  }
  check(k <= num_experts, "num_experts_per_tok {} of {} n_routed_experts", k, num_experts);
  check(num_experts <= kMostExperts, "n_routed_experts {}, at most {} are supported", num_experts,
        kMostExperts);
  check(params.n_group >= 1 && num_experts % params.n_group == 0,
        "n_group {} does not divide n_routed_experts {}", params.n_group, num_experts);
  check(params.topk_group >= 1 && params.topk_group <= params.n_group,
        "topk_group {} of n_group {}", params.topk_group, params.n_group);
  if (num_experts == 0 || rows == 0) {
    return;
  }
  const bool no_aux_tc = params.method == RouterMethod::kNoAuxTc;
  const RouterArrays arrays = {
      .logits = params.logits.data<float>(),
      .logits_stride = params.logits.row_stride(),
      .bias = no_aux_tc && !params.correction_bias.empty() ? params.correction_bias.data<float>()
                                                           : nullptr,
      .num_experts = static_cast<std::int32_t>(num_experts),
      .num_groups =
          params.method == RouterMethod::kGreedy ? 1 : static_cast<std::int32_t>(params.n_group),
      .topk_group = static_cast<std::int32_t>(params.topk_group),
      .k = static_cast<std::int32_t>(k),
      .softmax = params.scoring == RouterScoring::kSoftmax,
      .sum_of_two = no_aux_tc,
      .normalise = params.norm_topk_prob,
      .scale = params.scale_always || !params.norm_topk_prob,
      .scaling_factor = params.routed_scaling_factor,
      .ids = params.expert_ids.data<std::int32_t>(),
      .ids_stride = params.expert_ids.row_stride(),
      .weights = params.expert_weights.data<float>(),
      .weights_stride = params.expert_weights.row_stride(),
  };
  router_kernel<<<static_cast<unsigned>(rows), kWarpThreads, 0, cuda_stream()>>>(arrays);
  check_launch("router");
}

}  // namespace kdtree
