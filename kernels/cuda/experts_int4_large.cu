// Experts with packed INT4 weights and bf16 activations for the large entries of the work list,
// bound by the tensor cores: weights are streamed once for up to 64 pairs.
//
// An item is an entry and some tiles of 16 matrix rows, over all columns. The eight warps of a
// block share an item's tiles, one or two (kRowTiles) a warp; each multiplies its tiles with all of
// the entry's pairs, kTokenTiles tiles of eight (mma.m16n8k16), and walks through all slices of the
// columns itself: where a slice ends, its `sums` are added to the totals. That is the order of
// experts_int4.cuh, so that the bits are those of the kernel for small entries. With two tiles a
// warp, gate and up of the same channels are one warp's; with one, they are two warps', and one
// reads the other's totals.
//
// A block takes items blockIdx.x, blockIdx.x + gridDim.x, ... of the list, kind after kind, most
// pairs first. Columns come in steps of two units: a ring in shared memory holds kStages steps of
// the weights, each warp's own ones, and of the pairs' rows of x, which all warps read; it is
// filled by cp.async across the ends of items and drained between kinds. Every kBatch steps the
// block waits for the next kBatch and refills what it has read of the last: one __syncthreads for
// both.
//
// Totals lie in shared memory, one float4 a lane and 16 x 8 tile: registers hold the sums of a
// slice only (64 of kind 0), and no thread need spill. In bytes, with 227 KB of shared memory:
//   kind 0, 64 pairs, 2 x 8 tiles a warp:  totals 65536, stage 18432 + 16384,  4 stages
//   kind 1, 48 pairs, 2 x 6 tiles a warp:  totals 49152, stage 18432 + 12288,  5 stages
//   kind 2, 32 pairs, 2 x 4 tiles a warp:  totals 32768, stage 18432 +  8192,  7 stages
//   kind 3, 16 pairs, 1 x 2 tiles a warp:  totals  8192, stage  9216 +  4096, 12 stages
// and with 99 KB, one tile a warp throughout:
//   kind 0:  totals 32768, stage 9216 + 16384,  2 stages    kind 2:  16384, 9216 + 8192,  4 stages
//   kind 1:  totals 24576, stage 9216 + 12288,  3 stages    kind 3:   8192, 9216 + 4096,  7 stages
// One block of 256 threads a processor: up to 255 registers a thread. Two tiles a warp halve the
// reads of x from shared memory, which would limit an H200's tensor cores; where those are slower,
// as on sm_120, one tile is enough. Kind 3 is bound by the weights' bandwidth: smaller items,
// spread more evenly, serve it better.
#include <algorithm>

#include "kernels/cuda/cuda_call.h"
#include "kernels/cuda/experts_int4.cuh"
#include "kernels/cuda/experts_work.h"
#include "kernels/cuda/mma_sm80.cuh"

namespace kdtree {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpThreads;
constexpr int kStepUnits = 2;  // every slice has an even number of units
constexpr int kStepCodeBytes = kStepUnits * kUnitCodeBytes;    // of a tile
constexpr int kStepScaleBytes = kStepUnits * kUnitScaleBytes;  // of a tile
constexpr int kStepRowBytes = kStepUnits * static_cast<int>(kInt4UnitColumns) * 2;
constexpr int kChunkBytes = 16;  // what a cp.async copies
constexpr int kRowChunks = kStepRowBytes / kChunkBytes;
constexpr int kRowsAtOnce = kThreads / kRowChunks;  // rows of x that the threads copy together
constexpr int kMostStages = 12;
static_assert(kStepCodeBytes == 2 * kWarpThreads * kChunkBytes);  // two chunks a lane
static_assert(kStepScaleBytes == 8 * kChunkBytes && kRowsAtOnce == 16);

struct LargeLayer {
  const std::int32_t* num_entries;  // [kLargeKinds]
  const LargeExpertEntry* entries;
  const __nv_bfloat16* input;  // rows of x, or of `inner`
  std::int64_t input_stride;
  std::int32_t pairs_per_row;  // k for x, 1 for `inner`: input row = pair / pairs_per_row
  std::int32_t steps;          // along the columns
  std::int32_t slice_steps;    // of a slice
  std::int32_t tiles;          // of 16 rows of gate and up each, or of down
  std::int64_t out_features;   // of gate and up, or of down
  __nv_bfloat16* inner;        // [pairs, out] what gate and up give
  float* outer;                // [pairs, out] what down gives
};

template <bool kGateUp, int kSharedBytes, int kRowTileCount, int kTokenTileCount>
struct LargeShape {
  static constexpr int kRowTiles = kRowTileCount;
  static constexpr int kTokenTiles = kTokenTileCount;
  static constexpr int kTokens = 8 * kTokenTiles;
  static constexpr int kRowCopies = kTokens / kRowsAtOnce;  // chunks of x that a thread copies
  static_assert(kTokens % kRowsAtOnce == 0 && kTokens <= kLargeEntryPairs);
  // Of gate and of up each, or of down.
  static constexpr int kItemTiles = kWarps * kRowTiles / (kGateUp ? 2 : 1);
  // A stage: [warp][tile] codes, [warp][tile] scales, [pair] columns of x.
  static constexpr int kScalesAt = kWarps * kRowTiles * kStepCodeBytes;
  static constexpr int kRowsAt = kScalesAt + kWarps * kRowTiles * kStepScaleBytes;
  static constexpr int kStageBytes = kRowsAt + kTokens * kStepRowBytes;
  // Behind the ring: [warp][tile of rows][tile of pairs][lane] totals, float4 as mma has them
  static constexpr int kWarpTotals = kRowTiles * kTokenTiles * kWarpThreads;
  static constexpr int kTotalBytes = kWarps * kWarpTotals * 16;
  static constexpr int kStages = std::min(kMostStages, (kSharedBytes - kTotalBytes) / kStageBytes);
  static constexpr int kTotalsAt = kStages * kStageBytes;
  static constexpr int kBatch = kStages >= 6 ? 2 : 1;
  static_assert(kStages >= 2 * kBatch && kStageBytes % 128 == 0);
  static_assert(kTotalsAt + kTotalBytes <= kSharedBytes);

  // What tile r of a warp's is, in an item whose first tile is `first`.
  static __device__ int matrix(int warp, int r) {
    return !kGateUp ? 2 : kRowTiles == 2 ? r : warp / (kWarps / 2);
  }
  static __device__ int tile(int first, int warp, int r) {
    if constexpr (kGateUp) {
      return first + (kRowTiles == 2 ? warp : warp % (kWarps / 2));
    }
    return first + warp * kRowTiles + r;
  }
};

// Where a thread copies from: its lane's chunks of its warp's tiles, and its chunks of x.
template <class Shape>
struct Source {
  const std::byte* codes[Shape::kRowTiles];
  const std::byte* scales;
  const std::byte* input;                // the thread's chunk of row 0
  std::int32_t rows[Shape::kRowCopies];  // -1 behind the entry's last pair: zeros

  __device__ void open(const LargeLayer& layer, const LargeExpertEntry& entry, int first) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
    const std::int64_t units = std::int64_t{layer.steps} * kStepUnits;
    // Tiles behind the last one are the last one again; nothing is stored of them.
#pragma unroll
    for (int r = 0; r < Shape::kRowTiles; ++r) {
      const std::int64_t unit = min(Shape::tile(first, warp, r), layer.tiles - 1) * units;
      codes[r] = entry.codes[Shape::matrix(warp, r)] + unit * kUnitCodeBytes + lane * kChunkBytes;
    }
    // Eight lanes a tile; the others copy no scales.
    const int r = min(lane / 8, Shape::kRowTiles - 1);
    const std::int64_t unit = min(Shape::tile(first, warp, r), layer.tiles - 1) * units;
    scales = entry.scales[Shape::matrix(warp, r)] + unit * kUnitScaleBytes + lane % 8 * kChunkBytes;
    input = reinterpret_cast<const std::byte*>(layer.input) +
            static_cast<int>(threadIdx.x) % kRowChunks * kChunkBytes;
#pragma unroll
    for (int i = 0; i < Shape::kRowCopies; ++i) {
      const int token = static_cast<int>(threadIdx.x) / kRowChunks + i * kRowsAtOnce;
      rows[i] = token < entry.count ? entry.pairs[token] / layer.pairs_per_row : -1;
    }
  }

  // Copies the next step to the stage at `stage`.
  __device__ void copy(const LargeLayer& layer, std::uint32_t stage) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
#pragma unroll
    for (int r = 0; r < Shape::kRowTiles; ++r) {
      const std::uint32_t to =
          stage + (warp * Shape::kRowTiles + r) * kStepCodeBytes + lane * kChunkBytes;
      copy_async_16(to, codes[r], kChunkBytes);
      copy_async_16(to + kUnitCodeBytes, codes[r] + kUnitCodeBytes, kChunkBytes);
      codes[r] += kStepCodeBytes;
    }
    if (lane < 8 * Shape::kRowTiles) {
      copy_async_16(
          stage + Shape::kScalesAt + warp * Shape::kRowTiles * kStepScaleBytes + lane * kChunkBytes,
          scales, kChunkBytes);
    }
    scales += kStepScaleBytes;
    // The two halves of a group of eight chunks change places in odd rows: then the lanes' reads,
    // four chunks of each of two rows at a time, meet all banks.
    const int token = static_cast<int>(threadIdx.x) / kRowChunks;
    const int chunk = static_cast<int>(threadIdx.x) % kRowChunks ^ (token & 1) * 4;
#pragma unroll
    for (int i = 0; i < Shape::kRowCopies; ++i) {
      const std::int64_t row_bytes = std::int64_t{max(rows[i], 0)} * layer.input_stride * 2;
      copy_async_16(
          stage + Shape::kRowsAt + (token + i * kRowsAtOnce) * kStepRowBytes + chunk * kChunkBytes,
          input + row_bytes, rows[i] < 0 ? 0 : kChunkBytes);
    }
    input += kStepRowBytes;
  }
};

template <class Shape>
using Values = float[Shape::kRowTiles][Shape::kTokenTiles][4];

// sums += a step's products.
template <class Shape>
__device__ void multiply_step(const std::uint8_t* stage, Values<Shape>& sums) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int g = lane / 4;
  const int t = lane % 4;
  const std::uint8_t* codes = stage + warp * Shape::kRowTiles * kStepCodeBytes + lane * 16;
  const std::uint8_t* scales =
      stage + Shape::kScalesAt + warp * Shape::kRowTiles * kStepScaleBytes + g * 8;
  const std::uint8_t* rows = stage + Shape::kRowsAt + g * kStepRowBytes + t * kChunkBytes;
  const std::uint8_t* group_rows[2] = {rows + (g & 1) * 64, rows + 64 - (g & 1) * 64};
  // With the most accumulators, two units at once would need more registers than there are.
#pragma unroll(Shape::kRowTiles* Shape::kTokenTiles >= 16 ? 1 : kStepUnits)
  for (int u = 0; u < kStepUnits; ++u) {
    std::uint32_t words[Shape::kRowTiles][4];
    std::uint32_t scale_pairs[Shape::kRowTiles][2];
#pragma unroll
    for (int r = 0; r < Shape::kRowTiles; ++r) {
      const uint4 four =
          *reinterpret_cast<const uint4*>(codes + r * kStepCodeBytes + u * kUnitCodeBytes);
      const uint2 two =
          *reinterpret_cast<const uint2*>(scales + r * kStepScaleBytes + u * kUnitScaleBytes);
      words[r][0] = four.x, words[r][1] = four.y, words[r][2] = four.z, words[r][3] = four.w;
      scale_pairs[r][0] = two.x, scale_pairs[r][1] = two.y;
    }
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      std::uint32_t a[Shape::kRowTiles][2][4];
      float low[Shape::kRowTiles];
      float high[Shape::kRowTiles];
#pragma unroll
      for (int r = 0; r < Shape::kRowTiles; ++r) {
        low[r] = low_bfloat16(scale_pairs[r][group]);
        high[r] = high_bfloat16(scale_pairs[r][group]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t word = words[r][group * 2 + half];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            a[r][half][i] = code_pair(word >> (4 * i));
          }
        }
      }
#pragma unroll
      for (int n = 0; n < Shape::kTokenTiles; ++n) {
        const uint4 b = *reinterpret_cast<const uint4*>(group_rows[group] + n * 8 * kStepRowBytes +
                                                        u * (kStepRowBytes / kStepUnits));
#pragma unroll
        for (int r = 0; r < Shape::kRowTiles; ++r) {
          float products[4] = {0, 0, 0, 0};
          multiply_accumulate(products, a[r][0], b.x, b.y);
          multiply_accumulate(products, a[r][1], b.z, b.w);
          sums[r][n][0] = fmaf(low[r], products[0], sums[r][n][0]);
          sums[r][n][1] = fmaf(low[r], products[1], sums[r][n][1]);
          sums[r][n][2] = fmaf(high[r], products[2], sums[r][n][2]);
          sums[r][n][3] = fmaf(high[r], products[3], sums[r][n][3]);
        }
      }
    }
  }
}

// totals += sums, sums = 0; `first`: of the item's slices.
template <class Shape>
__device__ void end_slice(bool first, Values<Shape>& sums, float4* totals) {
#pragma unroll
  for (int r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < Shape::kTokenTiles; ++n) {
      float4& stored = totals[(r * Shape::kTokenTiles + n) * kWarpThreads];
      float4 total = first ? make_float4(0, 0, 0, 0) : stored;
      total.x += sums[r][n][0];
      total.y += sums[r][n][1];
      total.z += sums[r][n][2];
      total.w += sums[r][n][3];
      stored = total;
#pragma unroll
      for (float& sum : sums[r][n]) {
        sum = 0;
      }
    }
  }
}

// Stores what a lane has of an item: value i of tile n is row g + i / 2 * 8, pair 8 n + 2 t + i
// % 2.
template <bool kGateUp, class Shape>
__device__ void store_item(const LargeLayer& layer, const LargeExpertEntry& entry, int first,
                           const float4* totals) {
  constexpr bool kExchange = kGateUp && Shape::kRowTiles == 1;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int g = lane / 4;
  const int t = lane % 4;
  if constexpr (kExchange) {
    __syncthreads();  // gate's warps read up's totals
  }
  const int count = !kExchange || warp < kWarps / 2 ? entry.count : 0;
#pragma unroll 1
  for (int r = 0; r < (kGateUp ? 1 : Shape::kRowTiles); ++r) {
    const int tile = Shape::tile(first, warp, r);
    if (tile >= layer.tiles) {
      continue;
    }
    const std::int64_t row = tile * kInt4TileRows + g;
#pragma unroll 1
    for (int n = 0; n * 8 < count; ++n) {
      const float4* stored = totals + (r * Shape::kTokenTiles + n) * kWarpThreads;
      const float4 total = *stored;
      float values[4] = {total.x, total.y, total.z, total.w};
      if constexpr (kGateUp) {
        const float4 up =
            stored[kExchange ? kWarps / 2 * Shape::kWarpTotals : Shape::kTokenTiles * kWarpThreads];
        values[0] = gated(values[0], up.x);
        values[1] = gated(values[1], up.y);
        values[2] = gated(values[2], up.z);
        values[3] = gated(values[3], up.w);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int token = n * 8 + 2 * t + j;
        if (token < count) {
          const std::int64_t at = std::int64_t{entry.pairs[token]} * layer.out_features + row;
          if constexpr (kGateUp) {
            layer.inner[at] = __float2bfloat16_rn(values[j]);
            layer.inner[at + 8] = __float2bfloat16_rn(values[2 + j]);
          } else {
            layer.outer[at] = values[j];
            layer.outer[at + 8] = values[2 + j];
          }
        }
      }
    }
  }
  if constexpr (kExchange) {
    __syncthreads();  // up's warps may write their next totals
  }
}

// The block's items among those of `num_entries` entries of a kind: first, first + gridDim.x, ...
template <bool kGateUp, class Shape>
__device__ void run_kind(const LargeLayer& layer, const LargeExpertEntry* entries, int num_items,
                         int entry_items, int first_item, std::uint8_t* ring) {
  constexpr int kStages = Shape::kStages;
  constexpr int kBatch = Shape::kBatch;
  if (first_item >= num_items) {
    return;
  }
  // The copies' place in the block's items.
  Source<Shape> source;
  int ahead_item = first_item;
  int ahead_step = 0;
  int ahead_stage = 0;
  const auto open_item = [&] {
    source.open(layer, entries[ahead_item / entry_items],
                ahead_item % entry_items * Shape::kItemTiles);
  };
  const auto copy_next = [&] {
    if (ahead_item < num_items) {
      source.copy(layer, shared_address(ring) +
                             static_cast<std::uint32_t>(ahead_stage * Shape::kStageBytes));
      if (++ahead_step == layer.steps) {
        ahead_step = 0;
        ahead_item += static_cast<int>(gridDim.x);
        if (ahead_item < num_items) {
          open_item();
        }
      }
    }
    ahead_stage = ahead_stage + 1 == kStages ? 0 : ahead_stage + 1;
    copy_async_commit();  // empty behind the last item, so that the count of groups goes on
  };
  open_item();
#pragma unroll 1
  for (int i = 0; i < kStages - kBatch; ++i) {
    copy_next();
  }

  float4* totals = reinterpret_cast<float4*>(ring + Shape::kTotalsAt) +
                   static_cast<int>(threadIdx.x) / kWarpThreads * Shape::kWarpTotals +
                   static_cast<int>(threadIdx.x) % kWarpThreads;
  int stage = 0;
  int turn = 0;  // steps of the batch done
#pragma unroll 1
  for (int item = first_item; item < num_items; item += static_cast<int>(gridDim.x)) {
    Values<Shape> sums = {};
    int slice_left = layer.slice_steps;
#pragma unroll 1
    for (int step = 0; step < layer.steps; ++step) {
      if (turn == 0) {
        // This batch has arrived for every thread, and all are done with the one before it.
        copy_async_wait<kStages - 2 * kBatch>();
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < kBatch; ++i) {
          copy_next();
        }
      }
      turn = turn + 1 == kBatch ? 0 : turn + 1;
      multiply_step<Shape>(ring + stage * Shape::kStageBytes, sums);
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if (--slice_left == 0) {
        slice_left = layer.slice_steps;
        end_slice<Shape>(step < layer.slice_steps, sums, totals);
      }
    }
    store_item<kGateUp, Shape>(layer, entries[item / entry_items],
                               item % entry_items * Shape::kItemTiles, totals);
  }
  // The next kind has other stages.
  copy_async_wait<0>();
  __syncthreads();
}

template <bool kGateUp, int kSharedBytes>
__global__ void __launch_bounds__(kThreads, 1) large_experts_kernel(LargeLayer layer) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  const LargeExpertEntry* entries = layer.entries;
  int items_before = 0;
  const auto run = [&]<class Shape>(int kind, Shape) {
    const int num_entries = layer.num_entries[kind];
    const int entry_items = (layer.tiles + Shape::kItemTiles - 1) / Shape::kItemTiles;
    const int num_items = num_entries * entry_items;
    // Items are dealt out in turn through all kinds.
    const int next = static_cast<int>(blockIdx.x) - items_before % static_cast<int>(gridDim.x);
    const int first = next < 0 ? next + static_cast<int>(gridDim.x) : next;
    run_kind<kGateUp, Shape>(layer, entries, num_items, entry_items, first, shared_memory);
    entries += num_entries;
    items_before += num_items;
  };
  constexpr int kRowTiles = kSharedBytes >= kLargeSharedMemory ? 2 : 1;
  run(0, LargeShape<kGateUp, kSharedBytes, kRowTiles, 8>());
  run(1, LargeShape<kGateUp, kSharedBytes, kRowTiles, 6>());
  run(2, LargeShape<kGateUp, kSharedBytes, kRowTiles, 4>());
  run(3, LargeShape<kGateUp, kSharedBytes, 1, 2>());
}

template <bool kGateUp, int kSharedBytes>
void launch(const LargeLayer& layer, int num_processors, cudaStream_t stream) {
  const auto kernel = large_experts_kernel<kGateUp, kSharedBytes>;
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
      "experts, shared memory");
  kernel<<<static_cast<unsigned>(num_processors), kThreads, kSharedBytes, stream>>>(layer);
  check_launch(kGateUp ? "experts, INT4 gate and up, large" : "experts, INT4 down, large");
}

template <bool kGateUp>
void launch_layer(const LargeLayer& layer, const cudaDeviceProp& device, cudaStream_t stream) {
  if (device.sharedMemPerBlockOptin >= static_cast<std::size_t>(kLargeSharedMemory)) {
    launch<kGateUp, kLargeSharedMemory>(layer, device.multiProcessorCount, stream);
  } else {
    launch<kGateUp, kSmallSharedMemory>(layer, device.multiProcessorCount, stream);
  }
}

}  // namespace

void run_large_int4_experts(const ExpertsWork& work, bool gate_up, const cudaDeviceProp& device,
                            cudaStream_t stream) {
  const std::int64_t in_features = gate_up ? work.hidden : work.intermediate;
  const std::int64_t out_features = gate_up ? work.intermediate : work.hidden;
  const Int4Slices slices = int4_slices(in_features);
  check(slices.slice_units > 0 && slices.slice_units % kStepUnits == 0,
        "no INT4 kernel for slices of {} units", slices.slice_units);
  auto* inner = static_cast<__nv_bfloat16*>(work.inner);
  LargeLayer layer = {};
  layer.num_entries = work.num_large_entries;
  layer.entries = work.large_entries;
  layer.input = gate_up ? static_cast<const __nv_bfloat16*>(work.x) : inner;
  layer.input_stride = gate_up ? work.x_stride : work.intermediate;
  layer.pairs_per_row = gate_up ? static_cast<std::int32_t>(work.k) : 1;
  layer.slice_steps = slices.slice_units / kStepUnits;
  layer.steps = layer.slice_steps * slices.num_slices;
  layer.tiles = static_cast<std::int32_t>(out_features / kInt4TileRows);
  layer.out_features = out_features;
  // An item has a tile at least, and a block looks one round of items ahead.
  check(most_large_entries(work.num_pairs) * layer.tiles <= 0x7fffffff - (1 << 20),
        "{} pairs are too many for INT4 experts", work.num_pairs);
  layer.inner = inner;
  layer.outer = work.outer;
  if (gate_up) {
    launch_layer<true>(layer, device, stream);
  } else {
    launch_layer<false>(layer, device, stream);
  }
}

}  // namespace kdtree
