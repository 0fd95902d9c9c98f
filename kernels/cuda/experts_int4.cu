// Experts with packed INT4 weights and bf16 activations, bound by the bandwidth of the weights.
//
// The eight warps of a block share the columns: each keeps its slice of an entry's eight input rows
// in registers, as B operands of mma.m16n8k16, and streams tiles of 16 matrix rows past them, one
// bulk copy of codes and one of scales a tile and slice, kStages tiles ahead. The warps' partial
// sums of a tile meet in shared memory and are added in order of the slices. Slices depend on the
// shape alone, so that a row's bits do not depend on the other rows of the call.
//
// Codes become exact bf16 integers (code - 8); a group's products are summed by the tensor core in
// float32, then scaled and added in float32: weights are (code - 8) * scale, never rounded.
#include <algorithm>

#include "kernels/cuda/cuda_call.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/experts_int4.cuh"
#include "kernels/cuda/experts_work.h"

namespace kdtree {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpThreads;
constexpr unsigned kAllLanes = 0xffffffffU;

struct Int4Layer {
  const std::int32_t* num_entries;
  const ExpertEntry* entries;
  const __nv_bfloat16* input;  // rows of x, or of `inner`
  std::int64_t input_stride;
  std::int32_t pairs_per_row;  // k for x, 1 for `inner`: input row = pair / pairs_per_row
  std::int32_t num_slices;
  std::int32_t steps;         // of a block through an entry: tiles / (kWarps / num_slices)
  std::int64_t out_features;  // of gate and up, or of down
  __nv_bfloat16* inner;       // [pairs, out] what gate and up give
  float* outer;               // [pairs, out] what down gives
};

template <int kSliceUnits, bool kGateUp, int kStages>
struct Int4Shape {
  static constexpr int kMatrices = kGateUp ? 2 : 1;
  static constexpr int kCodeBytes = kSliceUnits * kUnitCodeBytes;
  static constexpr int kScaleBytes = kSliceUnits * kUnitScaleBytes;
  static constexpr int kStageBytes = kCodeBytes + kScaleBytes;
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kBarrierBytes = kWarps * kStages * 8;
  // Partial sums of a step: [2 in turn][matrix][warp][lane]
  static constexpr int kPartialBytes = 2 * kMatrices * kWarps * kWarpThreads * 16;
  static constexpr int kSharedBytes = kRingBytes + kBarrierBytes + kPartialBytes;
  static_assert(kSharedBytes <=
                (kStages == 1 || kSliceUnits <= 8 ? kSmallSharedMemory : kLargeSharedMemory));
  static_assert(kCodeBytes % 128 == 0 && kScaleBytes % 128 == 0 && kStageBytes % 128 == 0);
};

__device__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ uint4 load_shared4(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

__device__ uint2 load_shared2(std::uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

__device__ void init_barrier(std::uint32_t barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0],1;" ::"r"(barrier) : "memory");
}

__device__ void wait_barrier(std::uint32_t barrier, std::uint32_t phase) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile("{.reg .pred P; mbarrier.try_wait.parity.shared.b64 P,[%1],%2; selp.u32 %0,1,0,P;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
  }
}

// Weights are read once: they should not push activations out of the L2 cache.
__device__ std::uint64_t read_once_policy() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  return policy;
}

__device__ void expect_bytes(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ void bulk_copy(std::uint32_t to, const std::byte* from, int bytes, std::uint32_t barrier,
                          std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0],[%1],%2,[%3],%4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Steps run over (entry, group of tiles); a block takes a contiguous range of them, so that it
// loads new input rows only where an entry ends. A group of num_slices warps works on one tile;
// kWarps / num_slices groups side by side. Gate and up tiles of the same channels follow each other
// in a warp's ring.
template <int kSliceUnits, bool kGateUp, int kStages>
__global__ void __launch_bounds__(kThreads, 1) int4_experts_kernel(Int4Layer layer) {
  using Sizes = Int4Shape<kSliceUnits, kGateUp, kStages>;
  constexpr int kMatrices = Sizes::kMatrices;
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int g = lane / 4;
  const int t = lane % 4;
  const int num_slices = layer.num_slices;
  const int num_groups = kWarps / num_slices;
  const int slice = warp % num_slices;
  const int group = warp / num_slices;

  const std::uint32_t ring = shared_address(shared_memory) +
                             static_cast<std::uint32_t>(warp * kStages * Sizes::kStageBytes);
  const std::uint32_t barriers = shared_address(shared_memory) +
                                 static_cast<std::uint32_t>(Sizes::kRingBytes + warp * kStages * 8);
  auto* partials =
      reinterpret_cast<float4*>(shared_memory + Sizes::kRingBytes + Sizes::kBarrierBytes);
  if (lane == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(barriers + stage * 8);
    }
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncwarp();

  const std::int64_t num_steps = std::int64_t{*layer.num_entries} * layer.steps;
  const std::int64_t begin = num_steps * blockIdx.x / gridDim.x;
  const std::int64_t end = num_steps * (blockIdx.x + 1) / gridDim.x;
  if (begin >= end) {
    return;
  }

  // The producer's place; lane 0 alone copies.
  const std::uint64_t policy = read_once_policy();
  const std::int64_t tile_units = std::int64_t{num_slices} * kSliceUnits;
  std::int64_t ahead = begin;
  auto ahead_entry = static_cast<int>(begin / layer.steps);
  auto ahead_step = static_cast<int>(begin % layer.steps);
  int ahead_matrix = 0;
  int ahead_stage = 0;
  const std::byte* first_codes = nullptr;  // of gate, or of down
  const std::byte* first_scales = nullptr;
  const std::byte* second_codes = nullptr;  // of up
  const std::byte* second_scales = nullptr;
  const auto open_entry = [&] {
    if (lane == 0) {
      const ExpertEntry& entry = layer.entries[ahead_entry];
      first_codes = entry.codes[kGateUp ? 0 : 2];
      first_scales = entry.scales[kGateUp ? 0 : 2];
      if constexpr (kGateUp) {
        second_codes = entry.codes[1];
        second_scales = entry.scales[1];
      }
    }
  };
  const auto copy_next = [&] {
    if (ahead >= end) {
      return;
    }
    if (lane == 0) {
      const std::int64_t tile = std::int64_t{ahead_step} * num_groups + group;
      const std::int64_t unit = tile * tile_units + slice * kSliceUnits;
      const std::uint32_t to = ring + ahead_stage * Sizes::kStageBytes;
      const std::uint32_t barrier = barriers + ahead_stage * 8;
      const bool second = kGateUp && ahead_matrix == 1;
      expect_bytes(barrier, Sizes::kStageBytes);
      bulk_copy(to, (second ? second_codes : first_codes) + unit * kUnitCodeBytes,
                Sizes::kCodeBytes, barrier, policy);
      bulk_copy(to + Sizes::kCodeBytes,
                (second ? second_scales : first_scales) + unit * kUnitScaleBytes,
                Sizes::kScaleBytes, barrier, policy);
    }
    ahead_stage = ahead_stage + 1 == kStages ? 0 : ahead_stage + 1;
    if (++ahead_matrix == kMatrices) {
      ahead_matrix = 0;
      ++ahead;
      if (++ahead_step == layer.steps) {
        ahead_step = 0;
        ++ahead_entry;
        if (ahead < end) {
          open_entry();
        }
      }
    }
  };
  open_entry();
  for (int stage = 0; stage < kStages; ++stage) {
    copy_next();
  }

  uint4 x[kSliceUnits][2];  // this lane's B operands: row g of the entry
  auto entry_index = static_cast<int>(begin / layer.steps);
  auto step = static_cast<int>(begin % layer.steps);
  int loaded_entry = -1;
  int count = 0;
  int pair = 0;  // of row g
  int stage = 0;
  std::uint32_t phase = 0;
  int turn = 0;
  int first_part = slice;  // rotates, so that no warp of a group always sums
  for (std::int64_t i = begin; i < end; ++i) {
    if (entry_index != loaded_entry) {
      loaded_entry = entry_index;
      const ExpertEntry& entry = layer.entries[entry_index];
      count = entry.count;
      pair = entry.pairs[min(g, count - 1)];
      const std::int64_t row = pair / layer.pairs_per_row;
      const auto* from =
          reinterpret_cast<const uint4*>(layer.input + row * layer.input_stride +
                                         std::int64_t{slice} * kSliceUnits * kInt4UnitColumns) +
          t;
#pragma unroll
      for (int u = 0; u < kSliceUnits; ++u) {
        x[u][0] = __ldg(from + u * 8);
        x[u][1] = __ldg(from + u * 8 + 4);
      }
    }

    float4* step_partials = partials + turn * kMatrices * kWarps * kWarpThreads;
    turn ^= 1;
#pragma unroll 1
    for (int m = 0; m < kMatrices; ++m) {
      wait_barrier(barriers + stage * 8, phase);
      const std::uint32_t stage_codes = ring + stage * Sizes::kStageBytes;
      const std::uint32_t stage_scales = stage_codes + Sizes::kCodeBytes;
      float sums[4] = {0, 0, 0, 0};
#pragma unroll
      for (int u = 0; u < kSliceUnits; ++u) {
        const uint4 four = load_shared4(stage_codes + u * kUnitCodeBytes + lane * 16);
        const uint2 two = load_shared2(stage_scales + u * kUnitScaleBytes + g * 8);
        if (u == kSliceUnits - 1) {  // all lanes have read the stage
          __syncwarp();
          copy_next();
          stage = stage + 1 == kStages ? 0 : stage + 1;
          phase ^= stage == 0 ? 1U : 0U;
        }
        const std::uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int group_of_unit = 0; group_of_unit < 2; ++group_of_unit) {
          const std::uint32_t scale_pair = group_of_unit == 0 ? two.x : two.y;
          const uint4 b = x[u][group_of_unit];
          float products[4] = {0, 0, 0, 0};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const std::uint32_t word = words[group_of_unit * 2 + half];
            const std::uint32_t a[4] = {code_pair(word), code_pair(word >> 4), code_pair(word >> 8),
                                        code_pair(word >> 12)};
            multiply_accumulate(products, a, half == 0 ? b.x : b.z, half == 0 ? b.y : b.w);
          }
          const float low = low_bfloat16(scale_pair);
          const float high = high_bfloat16(scale_pair);
          sums[0] = fmaf(low, products[0], sums[0]);
          sums[1] = fmaf(low, products[1], sums[1]);
          sums[2] = fmaf(high, products[2], sums[2]);
          sums[3] = fmaf(high, products[3], sums[3]);
        }
      }
      step_partials[(m * kWarps + warp) * kWarpThreads + lane] =
          make_float4(sums[0], sums[1], sums[2], sums[3]);
    }

    // The group's warps meet. One barrier a step is enough: the other buffer is in use until the
    // next one.
    asm volatile("bar.sync %0,%1;" ::"r"(1 + group), "r"(num_slices * kWarpThreads) : "memory");
    const std::int64_t tile = std::int64_t{step} * num_groups + group;
    for (int part = first_part; part * kWarpThreads < kInt4TileRows * count; part += num_slices) {
      const int output = part * kWarpThreads + lane;
      const int row = output % static_cast<int>(kInt4TileRows);
      const int token = output / static_cast<int>(kInt4TileRows);
      const std::int64_t target = __shfl_sync(kAllLanes, pair, token * 4 % kWarpThreads);
      if (token < count) {
        // Element (row, token) of the 16 x 8 tile as mma spreads it over lanes and registers.
        const int place = ((row & 7) * 4 + token / 2) * 4 + (row >> 3) * 2 + (token & 1);
        float totals[kMatrices];
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
          const auto* own = reinterpret_cast<const float*>(
                                step_partials + (m * kWarps + group * num_slices) * kWarpThreads) +
                            place;
          float total = 0;
          for (int s = 0; s < num_slices; ++s) {
            total += own[s * kWarpThreads * 4];
          }
          totals[m] = total;
        }
        const std::int64_t at = target * layer.out_features + tile * kInt4TileRows + row;
        if constexpr (kGateUp) {
          layer.inner[at] = __float2bfloat16_rn(gated(totals[0], totals[1]));
        } else {
          layer.outer[at] = totals[0];
        }
      }
    }
    first_part = first_part == 0 ? num_slices - 1 : first_part - 1;
    if (++step == layer.steps) {
      step = 0;
      ++entry_index;
    }
  }
}

template <int kSliceUnits, bool kGateUp, int kStages>
void launch(const Int4Layer& layer, int num_processors, cudaStream_t stream) {
  constexpr int kBytes = Int4Shape<kSliceUnits, kGateUp, kStages>::kSharedBytes;
  const auto kernel = int4_experts_kernel<kSliceUnits, kGateUp, kStages>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "experts, shared memory");
  kernel<<<static_cast<unsigned>(num_processors), kThreads, kBytes, stream>>>(layer);
  check_launch(kGateUp ? "experts, INT4 gate and up" : "experts, INT4 down");
}

template <int kSliceUnits, bool kGateUp>
void launch_staged(const Int4Layer& layer, const cudaDeviceProp& device, cudaStream_t stream) {
  using Deep = Int4Shape<kSliceUnits, kGateUp, 2>;
  if constexpr (Deep::kSharedBytes > kSmallSharedMemory) {
    if (static_cast<std::size_t>(Deep::kSharedBytes) > device.sharedMemPerBlockOptin) {
      launch<kSliceUnits, kGateUp, 1>(layer, device.multiProcessorCount, stream);
      return;
    }
  }
  launch<kSliceUnits, kGateUp, 2>(layer, device.multiProcessorCount, stream);
}

// The sizes of int4_slices.
template <bool kGateUp>
void launch_layer(const Int4Layer& layer, int slice_units, const cudaDeviceProp& device,
                  cudaStream_t stream) {
  switch (slice_units) {
    case 16:
      return launch_staged<16, kGateUp>(layer, device, stream);
    case 14:
      return launch_staged<14, kGateUp>(layer, device, stream);
    case 8:
      return launch_staged<8, kGateUp>(layer, device, stream);
    case 4:
      return launch_staged<4, kGateUp>(layer, device, stream);
    case 2:
      return launch_staged<2, kGateUp>(layer, device, stream);
    default:
      fail("no INT4 kernel for slices of {} units", slice_units);
  }
}

// Tiles that a block works on side by side.
std::int64_t tiles_a_step(std::int64_t in_features) {
  return kWarps / int4_slices(in_features).num_slices;
}

bool layer_fits(std::int64_t in_features, std::int64_t out_features) {
  return int4_slices(in_features).num_slices > 0 && out_features > 0 &&
         out_features % (kInt4TileRows * tiles_a_step(in_features)) == 0;
}

}  // namespace

bool int4_experts_fit(std::int64_t hidden, std::int64_t intermediate) {
  return layer_fits(hidden, intermediate) && layer_fits(intermediate, hidden);
}

void run_int4_experts(const ExpertsWork& work, const cudaDeviceProp& device, cudaStream_t stream) {
  auto* inner = static_cast<__nv_bfloat16*>(work.inner);
  const auto layer = [&](std::int64_t in_features, std::int64_t out_features) {
    Int4Layer made = {};
    made.num_entries = work.num_entries;
    made.entries = work.entries;
    made.num_slices = int4_slices(in_features).num_slices;
    made.steps =
        static_cast<std::int32_t>(out_features / kInt4TileRows / tiles_a_step(in_features));
    made.out_features = out_features;
    made.inner = inner;
    made.outer = work.outer;
    return made;
  };
  Int4Layer gate_up = layer(work.hidden, work.intermediate);
  gate_up.input = static_cast<const __nv_bfloat16*>(work.x);
  gate_up.input_stride = work.x_stride;
  gate_up.pairs_per_row = static_cast<std::int32_t>(work.k);
  launch_layer<true>(gate_up, int4_slices(work.hidden).slice_units, device, stream);
  if (work.large_entries != nullptr) {
    run_large_int4_experts(work, true, device, stream);
  }

  Int4Layer down = layer(work.intermediate, work.hidden);
  down.input = inner;
  down.input_stride = work.intermediate;
  down.pairs_per_row = 1;
  launch_layer<false>(down, int4_slices(work.intermediate).slice_units, device, stream);
  if (work.large_entries != nullptr) {
    run_large_int4_experts(work, false, device, stream);
  }
}

}  // namespace kdtree
