// Attention of a few queries over one split of their keys, for any head sizes, in float32.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/attention_merge.cuh"
#include "kernels/cuda/elements.h"

namespace kdtree {

constexpr int kSplitQueries = 8;  // of a block; one warp each for the softmax
constexpr int kSplitThreads = 32 * kSplitQueries;
constexpr int kSplitBlocksPerSm = 2;  // room for its registers
constexpr int kSplitChunk = 64;       // keys taken at a time: the bits of one visibility word

// Eight queries that see the same keys.
template <class T>
struct SplitQueries {
  const T* first = nullptr;
  std::int64_t stride = 0;
  int count = 0;  // 1..kSplitQueries
  float scale = 1;
};

// Key i of the split is key_dim values at keys + i * stride, and value_dim values at values + i *
// stride.
template <class T>
struct SplitKeys {
  const T* keys = nullptr;
  const T* values = nullptr;
  std::int64_t stride = 0;
  int key_dim = 0;
  int value_dim = 0;
  int count = 0;
};

// Where the results go: query i is row first_row + i * row_step of the partials.
struct SplitTarget {
  AttentionPartials partials;
  std::int64_t partial = 0;
  std::int64_t first_row = 0;
  std::int64_t row_step = 1;
};

// Shared memory of attend_split, without the device's opt-in for more.
constexpr std::int64_t kMaxSplitSharedBytes = 48 * 1024;
constexpr std::int64_t split_shared_bytes(std::int64_t key_dim, std::int64_t value_dim) {
  return (key_dim + value_dim + kSplitChunk + 1) * kSplitQueries *
         static_cast<std::int64_t>(sizeof(float));
}

// Bits of a chunk's first `count` keys.
__device__ __forceinline__ std::uint64_t first_bits(int count) {
  return count >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
}

// Sums 16 values over a warp; lane l returns the sum of value l / 2. All sums are added in the same
// order, so that a query's bits do not depend on its place.
__device__ __forceinline__ float sum_of_sixteen(float (&values)[16], int lane) {
#pragma unroll
  for (int half = 8; half > 0; half /= 2) {
    const bool upper = (lane & (2 * half)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? values[i] : values[i + half];
      const float kept = upper ? values[i + half] : values[i];
      values[i] = kept + __shfl_xor_sync(~0U, sent, 2 * half);
    }
  }
  return values[0] + __shfl_xor_sync(~0U, values[0], 1);
}

// Runs in a block of kSplitThreads threads with split_shared_bytes() of shared memory, aligned to
// 16 bytes. visible(chunk) is the word of the keys 64 * chunk, ... that the queries see, the same
// in all threads; bits of keys behind the split's last do not count. Keys that are not visible are
// not read. A query's results follow from its own values, the visible keys and their places alone.
template <class T, class Visible>
__device__ __forceinline__ void attend_split(const SplitQueries<T>& queries,
                                             const SplitKeys<T>& keys, const SplitTarget& target,
                                             const Visible& visible, float* shared) {
  const int thread = threadIdx.x;
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int key_dim = keys.key_dim;
  const int value_dim = keys.value_dim;
  // Four queries side by side, so that one 16-byte load serves four products.
  float4* const query_quads = reinterpret_cast<float4*>(shared);               // [2, key_dim]
  float4* const sum_quads = query_quads + 2 * key_dim;                         // [2, value_dim]
  float* const weights = reinterpret_cast<float*>(sum_quads + 2 * value_dim);  // [chunk, queries]
  float* const rescale = weights + kSplitChunk * kSplitQueries;                // [queries]

  for (int i = 0; i < kSplitQueries; ++i) {
    float* const quads = reinterpret_cast<float*>(query_quads + (i / 4) * key_dim);
    for (int c = thread; c < key_dim; c += kSplitThreads) {
      quads[c * 4 + i % 4] =
          i < queries.count ? to_float(queries.first[i * queries.stride + c]) : 0;
    }
  }
  for (int i = thread; i < 2 * value_dim; i += kSplitThreads) {
    sum_quads[i] = {0, 0, 0, 0};  // each thread touches its own ones only, here and below
  }
  float highest = -INFINITY;  // of query number `warp`
  float total = 0;
  __syncthreads();

  for (int begin = 0; begin < keys.count; begin += kSplitChunk) {
    const std::uint64_t word = visible(begin / kSplitChunk) & first_bits(keys.count - begin);
    if (word == 0) {
      continue;  // changes nothing, and the whole block agrees
    }
    const T* const chunk_keys = keys.keys + begin * keys.stride;
    const T* const chunk_values = keys.values + begin * keys.stride;

    // Scores: a warp takes two keys at a time, its lanes every 32nd element.
    constexpr int kWarpKeys = kSplitChunk / kSplitQueries;
    for (int j = warp * kWarpKeys; j < (warp + 1) * kWarpKeys; j += 2) {
      const unsigned pair = static_cast<unsigned>(word >> j) & 3U;
      if (pair == 0) {
        continue;
      }
      // Of a pair with one visible key that one is taken twice and used once.
      const T* const key0 = chunk_keys + (j + ((pair & 1U) != 0 ? 0 : 1)) * keys.stride;
      const T* const key1 = chunk_keys + (j + ((pair & 2U) != 0 ? 1 : 0)) * keys.stride;
      float sums[16] = {};
#pragma unroll 4
      for (int c = lane; c < key_dim; c += 32) {
        const float a = to_float(key0[c]);
        const float b = to_float(key1[c]);
        const float4 low = query_quads[c];
        const float4 high = query_quads[key_dim + c];
        const float q[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sums[i] = fmaf(q[i], a, sums[i]);
          sums[8 + i] = fmaf(q[i], b, sums[8 + i]);
        }
      }
      const float score = sum_of_sixteen(sums, lane) * queries.scale;
      if (lane % 2 == 0) weights[j * kSplitQueries + lane / 2] = score;
    }
    __syncthreads();

    // Softmax: warp w has query w, lanes two keys each.
    {
      const bool sees0 = ((word >> lane) & 1U) != 0;
      const bool sees1 = ((word >> (lane + 32)) & 1U) != 0;
      float* const weight0 = weights + lane * kSplitQueries + warp;
      float* const weight1 = weight0 + 32 * kSplitQueries;
      const float score0 = sees0 ? *weight0 : -INFINITY;
      const float score1 = sees1 ? *weight1 : -INFINITY;
      float chunk_highest = fmaxf(score0, score1);
      for (int offset = 16; offset > 0; offset /= 2) {
        chunk_highest = fmaxf(chunk_highest, __shfl_xor_sync(~0U, chunk_highest, offset));
      }
      const float new_highest = fmaxf(highest, chunk_highest);
      // All -inf (or NaN, which fmaxf passes over): no -inf minus -inf.
      const float reference = new_highest == -INFINITY ? 0 : new_highest;
      const float factor = expf(highest - reference);
      const float p0 = sees0 ? expf(score0 - reference) : 0;
      const float p1 = sees1 ? expf(score1 - reference) : 0;
      float chunk_total = p0 + p1;
      for (int offset = 16; offset > 0; offset /= 2) {
        chunk_total += __shfl_xor_sync(~0U, chunk_total, offset);
      }
      total = fmaf(total, factor, chunk_total);
      highest = new_highest;
      *weight0 = p0;
      *weight1 = p1;
      if (lane == 0) rescale[warp] = factor;
    }
    __syncthreads();

    // Values: a thread adds one column for four queries, keys in ascending order.
    for (int item = thread; item < 2 * value_dim; item += kSplitThreads) {
      const int half = item >= value_dim ? 1 : 0;
      const T* const column = chunk_values + (item - half * value_dim);
      const float* const half_weights = weights + half * 4;
      const float4 factor = *reinterpret_cast<const float4*>(rescale + half * 4);
      float4 sum = sum_quads[item];
      sum = {sum.x * factor.x, sum.y * factor.y, sum.z * factor.z, sum.w * factor.w};
      const auto add_key = [&](int j) {
        const float value = to_float(column[j * keys.stride]);
        const float4 p = *reinterpret_cast<const float4*>(half_weights + j * kSplitQueries);
        sum.x = fmaf(p.x, value, sum.x);
        sum.y = fmaf(p.y, value, sum.y);
        sum.z = fmaf(p.z, value, sum.z);
        sum.w = fmaf(p.w, value, sum.w);
      };
      if (word == ~std::uint64_t{0}) {
#pragma unroll 8
        for (int j = 0; j < kSplitChunk; ++j) {
          add_key(j);
        }
      } else {
        for (std::uint64_t bits = word; bits != 0; bits &= bits - 1) {
          add_key(__ffsll(static_cast<long long>(bits)) - 1);
        }
      }
      sum_quads[item] = sum;
    }
    __syncthreads();
  }

  for (int item = thread; item < 2 * value_dim; item += kSplitThreads) {
    const int half = item >= value_dim ? 1 : 0;
    const int column = item - half * value_dim;
    const float4 sum = sum_quads[item];
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = half * 4 + i;
      if (query < queries.count) {
        target.partials.row(target.partial, target.first_row + query * target.row_step)[column] =
            values[i];
      }
    }
  }
  // The merge reads whole float4: what pads a partial is zero.
  const int padding = static_cast<int>(target.partials.stride) - value_dim;
  for (int item = thread; item < padding * queries.count; item += kSplitThreads) {
    const int query = item / padding;
    target.partials.row(target.partial,
                        target.first_row + query * target.row_step)[value_dim + item % padding] = 0;
  }
  if (lane == 0 && warp < queries.count) {
    *target.partials.stat(target.partial, target.first_row + warp * target.row_step) = {highest,
                                                                                        total};
  }
}

}  // namespace kdtree
