#include <algorithm>
#include <limits>

#include "kernels/cuda/attention_merge.cuh"
#include "kernels/cuda/cuda_call.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/shapes.h"

namespace kdtree {
namespace {

constexpr int kWarps = 8;
constexpr int kBlockColumns = 128;  // four for each lane
constexpr int kLoadsInFlight = 8;   // of a warp; with fewer the merge waits for memory

// Memory that partials may take; more rows than fit are handled in several passes.
constexpr std::int64_t kMaxScratchBytes = std::int64_t{256} << 20;

template <ExpBase kBase>
__device__ __forceinline__ float exponential(float x) {
  return kBase == ExpBase::kTwo ? exp2f(x) : expf(x);
}

__device__ __forceinline__ float4 add_scaled(float4 sum, float weight, float4 value) {
  return {fmaf(weight, value.x, sum.x), fmaf(weight, value.y, sum.y), fmaf(weight, value.z, sum.z),
          fmaf(weight, value.w, sum.w)};
}

// One block a (row, 128 columns). Warp w adds the partials w, w + 8, ... in ascending order, then
// the warps' sums are added in order of w: the order of all sums follows from the number of the
// row's partials alone.
template <class T, ExpBase kBase>
__global__ void __launch_bounds__(kWarps * 32)
    merge_kernel(AttentionMerge p, T* __restrict__ output, std::int64_t output_stride) {
  __shared__ float4 sums[kWarps][32];
  __shared__ float totals[kWarps];
  const int row = blockIdx.x;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int column = blockIdx.y * kBlockColumns + lane * 4;
  const int token = p.batch.first_row + row / p.num_heads;
  const int head = row % p.num_heads;
  const int sequence = p.batch.sequence(token);
  int num_keys = p.batch.prefix(sequence);
  if (!p.tree_split) {
    num_keys += p.batch.row_offsets[sequence + 1] - p.batch.row_offsets[sequence];
    num_keys = min(num_keys, p.batch.capacity);
  }
  const int count =
      (num_keys + p.split_length - 1) / p.split_length + static_cast<int>(p.tree_split);

  // fmaxf passes over NaN, which then comes back through the weights.
  float highest = -INFINITY;
  for (int i = lane; i < count; i += 32) {
    highest = fmaxf(highest, p.partials.stat(i, row)->x);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    highest = fmaxf(highest, __shfl_xor_sync(~0U, highest, offset));
  }
  if (highest == -INFINITY) {
    highest = 0;  // no key, or none but NaN: -inf minus -inf must not arise
  }

  const bool has_column = column < p.partials.stride;
  float4 sum = {0, 0, 0, 0};
  float total = 0;
  for (int first = warp; first < count; first += kWarps * kLoadsInFlight) {
    float4 values[kLoadsInFlight];
    float2 stats[kLoadsInFlight];
#pragma unroll
    for (int u = 0; u < kLoadsInFlight; ++u) {
      const int i = first + u * kWarps;
      values[u] = {0, 0, 0, 0};
      stats[u] = {-INFINITY, 0};
      if (i < count) {
        stats[u] = *p.partials.stat(i, row);
        if (has_column) {
          values[u] = *reinterpret_cast<const float4*>(p.partials.row(i, row) + column);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kLoadsInFlight; ++u) {
      const float weight = exponential<kBase>(stats[u].x - highest);
      total = fmaf(weight, stats[u].y, total);
      sum = add_scaled(sum, weight, values[u]);
    }
  }
  sums[warp][lane] = sum;
  if (lane == 0) totals[warp] = total;
  __syncthreads();
  if (warp != 0 || !has_column) {
    return;
  }
  sum = sums[0][lane];
  total = totals[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    const float4 other = sums[w][lane];
    sum.x += other.x;
    sum.y += other.y;
    sum.z += other.z;
    sum.w += other.w;
    total += totals[w];
  }
  if (total == 0) {
    sum = {0, 0, 0, 0};
    total = 1;
  }
  const float results[4] = {sum.x / total, sum.y / total, sum.z / total, sum.w / total};
  T* target = output + token * output_stride + static_cast<std::int64_t>(head) * p.value_dim;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i < p.value_dim) target[column + i] = from_float<T>(results[i]);
  }
}

template <class T>
void launch_merge(const AttentionMerge& merge, T* output, std::int64_t output_stride,
                  cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(merge.partials.num_rows),
                  static_cast<unsigned>((merge.value_dim + kBlockColumns - 1) / kBlockColumns));
  if (merge.base == ExpBase::kTwo) {
    merge_kernel<T, ExpBase::kTwo><<<grid, kWarps * 32, 0, stream>>>(merge, output, output_stride);
  } else {
    merge_kernel<T, ExpBase::kE><<<grid, kWarps * 32, 0, stream>>>(merge, output, output_stride);
  }
  check_launch("merge of attention splits");
}

// Short splits fill the GPU when there are few rows, long ones keep the partials' traffic low when
// there are many. The rows of a call must not decide, so their usual number does: many heads, many
// rows.
int split_length_for(std::int64_t capacity, std::int64_t num_heads) {
  const bool wide = num_heads > 16;
  if (capacity <= 1024) return 64;
  if (capacity <= 4096) return wide ? 256 : 128;
  if (capacity <= 16384) return wide ? 512 : 256;
  if (capacity <= 65536) return wide ? 1024 : 512;
  return wide ? 2048 : 1024;
}

}  // namespace

AttentionBatch attention_batch(const TreeBatch& batch, std::int64_t num_slots,
                               std::int64_t capacity) {
  constexpr std::int64_t kMaxInt = std::numeric_limits<int>::max() / 2;
  const BatchPointers pointers = batch_pointers(batch);
  check(batch.num_rows == 0 || (batch.num_sequences > 0 && num_slots > 0 && capacity > 0),
        "batch of {} rows in {} sequences over a cache of {} slots", batch.num_rows,
        batch.num_sequences, num_slots);
  check(batch.num_sequences <= kMaxInt && batch.num_rows <= kMaxInt && num_slots <= kMaxInt &&
            capacity <= kMaxInt,
        "batch of {} rows in {} sequences over {} slots of {} rows is too large for the kernels",
        batch.num_rows, batch.num_sequences, num_slots, capacity);
  return {.sequence_index = pointers.sequence_index,
          .slots = pointers.slots,
          .prefix_lengths = pointers.prefix_lengths,
          .row_offsets = pointers.row_offsets,
          .num_sequences = static_cast<int>(batch.num_sequences),
          .num_slots = static_cast<int>(num_slots),
          .capacity = static_cast<int>(capacity),
          .first_row = 0,
          .num_rows = static_cast<int>(batch.num_rows)};
}

AttentionPlan plan_attention(std::int64_t capacity, std::int64_t num_heads, std::int64_t value_dim,
                             std::int64_t num_tokens, bool tree_split) {
  constexpr std::int64_t kMaxPartials = 65535;  // they are the grids' second dimension
  AttentionPlan plan;
  plan.split_length = split_length_for(capacity, num_heads);
  const std::int64_t num_partials =
      (capacity + plan.split_length - 1) / plan.split_length + (tree_split ? 1 : 0);
  check(num_partials <= kMaxPartials, "a cache of {} rows has {} splits, expected at most {}",
        capacity, num_partials, kMaxPartials);
  plan.num_partials = static_cast<int>(num_partials);
  plan.stride = (value_dim + 3) / 4 * 4;
  const std::int64_t token_bytes = num_partials * num_heads *
                                   (plan.stride * static_cast<std::int64_t>(sizeof(float)) +
                                    static_cast<std::int64_t>(sizeof(float2)));
  plan.pass_tokens =
      std::min(num_tokens, std::max<std::int64_t>(1, kMaxScratchBytes / token_bytes));
  plan.scratch_bytes = plan.pass_tokens * token_bytes;
  return plan;
}

AttentionPartials AttentionPlan::partials(void* scratch, std::int64_t num_rows) const {
  AttentionPartials partials;
  partials.values = static_cast<float*>(scratch);
  partials.stats = reinterpret_cast<float2*>(partials.values + num_partials * num_rows * stride);
  partials.num_rows = num_rows;
  partials.stride = stride;
  return partials;
}

void merge_attention(const AttentionMerge& merge, const TensorView& output, cudaStream_t stream) {
  if (output.dtype() == DType::kFloat32) {
    launch_merge(merge, output.data<float>(), output.row_stride(), stream);
  } else {
    launch_merge(merge, reinterpret_cast<__nv_bfloat16*>(output.data<BFloat16>()),
                 output.row_stride(), stream);
  }
}

}  // namespace kdtree
