// Experts of every weight format in float32 arithmetic: the baseline that is exact up to rounding.
// Also what tests and unusual shapes run on.
#include <algorithm>

#include "kernels/cuda/cuda_call.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/experts_work.h"

namespace kdtree {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kWarps = kBlockThreads / kWarpThreads;
constexpr unsigned kAllLanes = 0xffffffffU;
constexpr int kWarpOutputs = 4;  // matrix rows that a warp has in hand

struct Layer {
  ExpertsWork work;
  std::int64_t in_features;
  std::int64_t out_features;
  bool aligned;  // the inputs' rows
};

template <bool kGateUp>
__device__ constexpr int warp_channels() {
  return kGateUp ? kWarpOutputs / 2 : kWarpOutputs;
}

__device__ float warp_sum(float value) {
  for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

// A warp computes a few output channels of an entry's rows: lane l adds up the products of columns
// 8 * l + 256 * i + 0..7, then the lanes are summed in a fixed order. Input: X rows of x for gate
// and up, the rows of `inner` for down.
template <class X, bool kGateUp>
__global__ void __launch_bounds__(kBlockThreads) generic_experts_kernel(Layer layer) {
  constexpr int kChannels = warp_channels<kGateUp>();
  const ExpertsWork& work = layer.work;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const std::int64_t in = layer.in_features;
  const std::int64_t out = layer.out_features;
  const std::int64_t blocks = (out + kWarps * kChannels - 1) / (kWarps * kChannels);
  const std::int64_t num_items = *work.num_entries * blocks;

  for (std::int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    const std::int64_t channel = (item % blocks * kWarps + warp) * kChannels;
    if (channel >= out) {
      continue;
    }
    const ExpertEntry& entry = work.entries[item / blocks];
    const int count = entry.count;
    const SlotMatrices& slot = work.slots[entry.slot];
    const MatrixRef first = kGateUp ? slot.gate : slot.down;
    const MatrixRef second = kGateUp ? slot.up : slot.down;
    const X* rows[kEntryPairs];
#pragma unroll
    for (int t = 0; t < kEntryPairs; ++t) {
      const std::int64_t pair = entry.pairs[min(t, count - 1)];
      rows[t] = kGateUp ? static_cast<const X*>(work.x) + pair / work.k * work.x_stride
                        : static_cast<const X*>(work.inner) + pair * in;
    }

    float sums[kWarpOutputs][kEntryPairs] = {};
    for (std::int64_t c = lane * 8; c < in; c += kWarpThreads * 8) {
      const int columns = static_cast<int>(min(std::int64_t{8}, in - c));
      float weights[kWarpOutputs][8];
#pragma unroll
      for (int o = 0; o < kWarpOutputs; ++o) {
        // A broken tile computes its last channel again and drops it.
        const std::int64_t row = min(channel + o % kChannels, out - 1);
        decode8(o < kChannels ? first : second, in, row, c, columns, weights[o]);
      }
#pragma unroll
      for (int t = 0; t < kEntryPairs; ++t) {
        if (t < count) {
          float x[8];
          load8(rows[t] + c, columns, layer.aligned, x);
#pragma unroll
          for (int o = 0; o < kWarpOutputs; ++o) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              sums[o][t] = fmaf(weights[o][i], x[i], sums[o][t]);
            }
          }
        }
      }
    }

#pragma unroll
    for (int t = 0; t < kEntryPairs; ++t) {
      if (t >= count) {
        break;
      }
      float all[kWarpOutputs];
#pragma unroll
      for (int o = 0; o < kWarpOutputs; ++o) {
        all[o] = warp_sum(sums[o][t]);
      }
      const std::int64_t pair = entry.pairs[t];
#pragma unroll
      for (int o = 0; o < kChannels; ++o) {
        if (lane != o || channel + o >= out) {
          continue;
        }
        if constexpr (kGateUp) {
          const float gate = all[o];
          static_cast<float*>(work.inner)[pair * out + channel + o] =
              gate / (1.0F + expf(-gate)) * all[o + kChannels];
        } else {
          work.outer[pair * out + channel + o] = all[o];
        }
      }
    }
  }
}

template <class X, bool kGateUp>
void launch(const Layer& layer, int num_processors, cudaStream_t stream) {
  constexpr std::int64_t kChannels = kWarps * (kGateUp ? kWarpOutputs / 2 : kWarpOutputs);
  constexpr std::int64_t kBlocksPerProcessor = 8;
  const std::int64_t items =
      layer.work.num_pairs * ((layer.out_features + kChannels - 1) / kChannels);
  const std::int64_t blocks =
      std::clamp<std::int64_t>(items, 1, num_processors * kBlocksPerProcessor);
  generic_experts_kernel<X, kGateUp>
      <<<static_cast<unsigned>(blocks), kBlockThreads, 0, stream>>>(layer);
  check_launch(kGateUp ? "experts, gate and up" : "experts, down");
}

}  // namespace

void run_generic_experts(const ExpertsWork& work, DType activation_dtype, int num_processors,
                         cudaStream_t stream) {
  const bool x_aligned = reinterpret_cast<std::uintptr_t>(work.x) % 16 == 0 &&
                         work.x_stride * dtype_bytes(activation_dtype) % 16 == 0;
  with_float_type(activation_dtype, [&](auto type) {
    launch<decltype(type), true>({.work = work,
                                  .in_features = work.hidden,
                                  .out_features = work.intermediate,
                                  .aligned = x_aligned},
                                 num_processors, stream);
  });
  launch<float, false>({.work = work,
                        .in_features = work.intermediate,
                        .out_features = work.hidden,
                        .aligned = work.intermediate % 4 == 0},
                       num_processors, stream);
}

}  // namespace kdtree
