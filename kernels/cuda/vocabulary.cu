// The best tokens of a part of the vocabulary, and the parts put together.
//
// A value and its id are compared as one 64-bit key: the value in order of its bits above the id's
// complement, so that the best key is the highest value with the lowest id, and no two keys of a
// row are equal. Rows are cut into chunks of a fixed size, one block each; a second block a row
// puts the chunks together.
#include <algorithm>

#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/shapes.h"

namespace kdtree {
namespace {

using Key = std::uint64_t;

constexpr int kWarpThreads = 32;
constexpr int kTopThreads = 1024;
constexpr int kTopWarps = kTopThreads / kWarpThreads;
constexpr unsigned kAllLanes = 0xffffffffU;
// Keys that a thread keeps in registers. A chunk of logits has as many as a block keeps.
constexpr int kHeldKeys = 8;
constexpr int kChunk = kTopThreads * kHeldKeys;
constexpr int kMostTop = 1024;
constexpr Key kNoKey = 0;  // below the key of every value

// NaN counts as -infinity, -0.0 equals 0.0. `position` >= 0.
__device__ Key make_key(float value, std::uint32_t position) {
  if (isnan(value)) {
    value = -INFINITY;
  }
  std::uint32_t bits = value == 0.0F ? 0U : __float_as_uint(value);
  bits = (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
  return (Key{bits} << 32) | static_cast<std::uint32_t>(~position);
}

__device__ std::uint32_t key_position(Key key) {
  return ~static_cast<std::uint32_t>(key);
}

__device__ float key_value(Key key) {
  const auto bits = static_cast<std::uint32_t>(key >> 32);
  return __uint_as_float((bits >> 31) != 0 ? bits & 0x7fffffffU : ~bits);
}

__device__ Key warp_max(Key key) {
  const auto high = static_cast<std::uint32_t>(key >> 32);
  const std::uint32_t best_high = __reduce_max_sync(kAllLanes, high);
  const auto low = high == best_high ? static_cast<std::uint32_t>(key) : 0U;
  return (Key{best_high} << 32) | __reduce_max_sync(kAllLanes, low);
}

// Sums and maxima over the block, in every thread. Two buffers in turn, so that one barrier a call
// is enough.
struct BlockReduction {
  int counts[2][kTopWarps];
  Key keys[kTopWarps];

  __device__ int count(int own, int turn) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    const int warp_count = __reduce_add_sync(kAllLanes, own);
    if (lane == 0) {
      counts[turn & 1][threadIdx.x / kWarpThreads] = warp_count;
    }
    __syncthreads();
    return __reduce_add_sync(kAllLanes, counts[turn & 1][lane]);
  }

  // Once a kernel.
  __device__ Key max(Key own) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    const Key best = warp_max(own);
    if (lane == 0) {
      keys[threadIdx.x / kWarpThreads] = best;
    }
    __syncthreads();
    return warp_max(keys[lane]);
  }
};
static_assert(kTopWarps == kWarpThreads);

// Where a block's keys come from: of one chunk of a row's logits, ...
struct LogitKeys {
  const float* logits;  // of the row
  std::int64_t begin;
  int count;

  __device__ Key operator()(int i) const {
    return make_key(logits[begin + i], static_cast<std::uint32_t>(begin + i));
  }
};

// ... of the chunks' best, ...
struct ChunkKeys {
  const Key* keys;
  int count;

  __device__ Key operator()(int i) const { return keys[i]; }
};

// ... or of the candidates of all parts for a row.
struct PartKeys {
  const float* values;
  const std::int32_t* ids;
  std::int64_t values_stride;  // from part to part
  std::int64_t ids_stride;
  int k_in;
  int count;

  __device__ Key operator()(int i) const {
    const std::int64_t part = i / k_in;
    const std::int64_t place = i % k_in;
    const std::int32_t id = ids[part * ids_stride + place];
    return id < 0 ? kNoKey
                  : make_key(values[part * values_stride + place], static_cast<std::uint32_t>(id));
  }
};

// Collects the k best keys of the block into best[0..k) in any order, kNoKey where there are fewer.
// The k-th best is found bit by bit from the top: each step counts the keys that are not below a
// candidate.
template <class Source>
__device__ void select_best(const Source& source, int k, BlockReduction& reduction, int* cursor,
                            Key* best) {
  const int thread = static_cast<int>(threadIdx.x);
  Key held[kHeldKeys];
#pragma unroll
  for (int j = 0; j < kHeldKeys; ++j) {
    const int i = j * kTopThreads + thread;
    held[j] = i < source.count ? source(i) : kNoKey;
  }
  const auto for_keys = [&](auto&& body) {
#pragma unroll
    for (int j = 0; j < kHeldKeys; ++j) {
      body(held[j]);
    }
    for (int i = kChunk + thread; i < source.count; i += kTopThreads) {
      body(source(i));
    }
  };

  if (k == 1) {
    Key own = kNoKey;
    for_keys([&](Key key) { own = key > own ? key : own; });
    own = reduction.max(own);
    if (thread == 0) {
      best[0] = own;
    }
    __syncthreads();
    return;
  }

  Key threshold = kNoKey;  // at least k keys are not below it, or it is kNoKey
  int turn = 0;
  for (int bit = 63; bit >= 0 && source.count > k; --bit) {
    const Key candidate = threshold | (Key{1} << bit);
    int own = 0;
    for_keys([&](Key key) { own += key >= candidate ? 1 : 0; });
    const int count = reduction.count(own, turn++);
    if (count >= k) {
      threshold = candidate;
    }
    if (count == k) {
      break;
    }
  }
  // Those above the threshold are fewer than k; the rest of the places is for those equal to it,
  // which are one unless somebody named an id twice.
  for (int i = thread; i < k; i += kTopThreads) {
    best[i] = threshold;
  }
  if (thread == 0) {
    *cursor = 0;
  }
  __syncthreads();
  for_keys([&](Key key) {
    if (key > threshold) {
      const int place = atomicAdd(cursor, 1);
      if (place < k) {
        best[place] = key;
      }
    }
  });
  __syncthreads();
}

// Sorts best[0..size) descending; size a power of 2, at most kTopThreads.
__device__ void sort_best(Key* best, int size) {
  const int i = static_cast<int>(threadIdx.x);
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      const int other = i ^ distance;
      if (i < size && other > i) {
        const Key a = best[i];
        const Key b = best[other];
        if ((a < b) == ((i & run) == 0)) {
          best[i] = b;
          best[other] = a;
        }
      }
      __syncthreads();
    }
  }
}

__device__ int power_of_two_from(int value) {
  int power = 1;
  while (power < value) {
    power *= 2;
  }
  return power;
}

// Selects and sorts: the k best keys, descending, in `best` [power of 2 from k].
template <class Source>
__device__ void sorted_best(const Source& source, int k, BlockReduction& reduction, int* cursor,
                            Key* best) {
  select_best(source, k, reduction, cursor, best);
  const int size = power_of_two_from(k);
  for (int i = k + static_cast<int>(threadIdx.x); i < size; i += kTopThreads) {
    best[i] = kNoKey;
  }
  __syncthreads();
  sort_best(best, size);
}

struct TopKArrays {
  const float* logits;
  std::int64_t logits_stride;
  std::int64_t cols;
  std::int64_t first_id;
  int k;
  float* values;
  std::int64_t values_stride;
  std::int32_t* ids;
  std::int64_t ids_stride;
  Key* chunk_keys;  // [rows, chunks, chunk_k], where there are several chunks
  int num_chunks;
  int chunk_k;
};

__global__ void __launch_bounds__(kTopThreads) top_k_chunks_kernel(TopKArrays arrays) {
  __shared__ BlockReduction reduction;
  __shared__ int cursor;
  __shared__ Key best[kMostTop];
  const std::int64_t row = blockIdx.y;
  const std::int64_t begin = std::int64_t{blockIdx.x} * kChunk;
  const std::int64_t left = arrays.cols - begin;
  const LogitKeys source = {arrays.logits + row * arrays.logits_stride, begin,
                            static_cast<int>(left < kChunk ? left : kChunk)};
  select_best(source, arrays.chunk_k, reduction, &cursor, best);
  Key* to = arrays.chunk_keys + (row * arrays.num_chunks + blockIdx.x) * arrays.chunk_k;
  for (int i = static_cast<int>(threadIdx.x); i < arrays.chunk_k; i += kTopThreads) {
    to[i] = best[i];
  }
}

__global__ void __launch_bounds__(kTopThreads) top_k_rows_kernel(TopKArrays arrays) {
  __shared__ BlockReduction reduction;
  __shared__ int cursor;
  __shared__ Key best[kMostTop];
  const std::int64_t row = blockIdx.x;
  const float* logits = arrays.logits + row * arrays.logits_stride;
  if (arrays.num_chunks == 1) {
    sorted_best(LogitKeys{logits, 0, static_cast<int>(arrays.cols)}, arrays.k, reduction, &cursor,
                best);
  } else {
    const int count = arrays.num_chunks * arrays.chunk_k;
    sorted_best(ChunkKeys{arrays.chunk_keys + row * count, count}, arrays.k, reduction, &cursor,
                best);
  }
  for (int i = static_cast<int>(threadIdx.x); i < arrays.k; i += kTopThreads) {
    const Key key = best[i];
    float value = -INFINITY;
    std::int32_t id = -1;
    if (key != kNoKey) {
      const std::uint32_t column = key_position(key);
      id = static_cast<std::int32_t>(arrays.first_id + column);
      value = logits[column];
      value = isnan(value) ? -INFINITY : value;
    }
    arrays.values[row * arrays.values_stride + i] = value;
    arrays.ids[row * arrays.ids_stride + i] = id;
  }
}

// log of the sum over the whole vocabulary of exp(logit), from the parts' (m, s), in order of the
// parts.
__device__ double log_sum_exp(const float* partials, std::int64_t parts, std::int64_t stride) {
  float highest = -INFINITY;
  for (std::int64_t p = 0; p < parts; ++p) {
    highest = fmaxf(highest, partials[p * stride]);
  }
  double sum = 0;
  for (std::int64_t p = 0; p < parts; ++p) {
    const float own = partials[p * stride];
    // Equal maxima need no exponential, which infinite ones do not have.
    const double factor = own == highest ? 1.0 : exp(static_cast<double>(own) - highest);
    sum += factor * partials[p * stride + 1];
  }
  return highest + log(sum);
}

struct MergeArrays {
  const float* part_values;
  const std::int32_t* part_ids;
  std::int64_t part_values_stride;
  std::int64_t part_ids_stride;
  const float* partials;  // or null
  std::int64_t partials_stride;
  std::int64_t parts;
  int k_in;
  int k_out;
  float* values;
  std::int64_t values_stride;
  std::int32_t* ids;
  std::int64_t ids_stride;
};

__global__ void __launch_bounds__(kTopThreads) merge_top_k_kernel(MergeArrays arrays) {
  __shared__ BlockReduction reduction;
  __shared__ int cursor;
  __shared__ Key best[kMostTop];
  __shared__ double normaliser;
  const std::int64_t row = blockIdx.x;
  if (threadIdx.x == 0) {
    normaliser = arrays.partials == nullptr
                     ? 0.0
                     : log_sum_exp(arrays.partials + row * 2, arrays.parts, arrays.partials_stride);
  }
  const PartKeys source = {arrays.part_values + row * arrays.k_in,
                           arrays.part_ids + row * arrays.k_in,
                           arrays.part_values_stride,
                           arrays.part_ids_stride,
                           arrays.k_in,
                           static_cast<int>(arrays.parts) * arrays.k_in};
  sorted_best(source, arrays.k_out, reduction, &cursor, best);  // its barriers order normaliser
  for (int i = static_cast<int>(threadIdx.x); i < arrays.k_out; i += kTopThreads) {
    const Key key = best[i];
    float value = key == kNoKey ? -INFINITY : key_value(key);
    if (arrays.partials != nullptr && value != -INFINITY) {
      value = static_cast<float>(value - normaliser);
    }
    arrays.values[row * arrays.values_stride + i] = value;
    arrays.ids[row * arrays.ids_stride + i] =
        key == kNoKey ? -1 : static_cast<std::int32_t>(key_position(key));
  }
}

__device__ float block_max(float own, float* shared) {
  for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) {
    own = fmaxf(own, __shfl_xor_sync(kAllLanes, own, offset));
  }
  if (threadIdx.x % kWarpThreads == 0) {
    shared[threadIdx.x / kWarpThreads] = own;
  }
  __syncthreads();
  float all = shared[threadIdx.x % kWarpThreads];
  for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) {
    all = fmaxf(all, __shfl_xor_sync(kAllLanes, all, offset));
  }
  return all;
}

__device__ float block_sum(float own, float* shared) {
  for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) {
    own += __shfl_xor_sync(kAllLanes, own, offset);
  }
  if (threadIdx.x % kWarpThreads == 0) {
    shared[threadIdx.x / kWarpThreads] = own;
  }
  __syncthreads();
  float all = shared[threadIdx.x % kWarpThreads];
  for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) {
    all += __shfl_xor_sync(kAllLanes, all, offset);
  }
  return all;
}

// (m, s) of one chunk of a row: to[row * to_stride + 2 * chunk].
__global__ void __launch_bounds__(kTopThreads)
    log_sum_exp_chunks_kernel(const float* logits, std::int64_t logits_stride, std::int64_t cols,
                              float* to, std::int64_t to_stride) {
  __shared__ float maxima[kTopWarps];
  __shared__ float sums[kTopWarps];
  const std::int64_t row = blockIdx.y;
  const std::int64_t begin = std::int64_t{blockIdx.x} * kChunk + threadIdx.x;
  const float* from = logits + row * logits_stride;
  float held[kHeldKeys];
  float highest = -INFINITY;
#pragma unroll
  for (int j = 0; j < kHeldKeys; ++j) {
    const std::int64_t c = begin + j * kTopThreads;
    held[j] = c < cols ? from[c] : -INFINITY;
    highest = fmaxf(highest, held[j]);  // ignores NaN
  }
  highest = block_max(highest, maxima);
  float sum = 0;
  if (highest > -INFINITY) {
#pragma unroll
    for (int j = 0; j < kHeldKeys; ++j) {
      // The maximum itself counts 1, also when it is infinite.
      const float own = isnan(held[j]) ? -INFINITY : held[j];
      sum += own == highest ? 1.0F : expf(own - highest);
    }
  }
  sum = block_sum(sum, sums);
  if (threadIdx.x == 0) {
    float* pair = to + row * to_stride + std::int64_t{blockIdx.x} * 2;
    pair[0] = highest;
    pair[1] = sum;
  }
}

// Puts the chunks of a row together, in their order; one thread a row.
__global__ void __launch_bounds__(kBlockThreads)
    log_sum_exp_rows_kernel(const float* chunks, std::int64_t num_chunks, std::int64_t rows,
                            float* partials, std::int64_t partials_stride) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
  if (row >= rows) {
    return;
  }
  const float* own = chunks + row * num_chunks * 2;
  float highest = -INFINITY;
  for (std::int64_t c = 0; c < num_chunks; ++c) {
    highest = fmaxf(highest, own[c * 2]);
  }
  float sum = 0;
  for (std::int64_t c = 0; c < num_chunks && highest > -INFINITY; ++c) {
    const float factor = own[c * 2] == highest ? 1.0F : expf(own[c * 2] - highest);
    sum += factor * own[c * 2 + 1];
  }
  partials[row * partials_stride] = highest;
  partials[row * partials_stride + 1] = sum;
}

// Blocks (chunks, rows).
dim3 chunk_grid(std::int64_t num_chunks, std::int64_t rows) {
  constexpr std::int64_t kMostRows = 65535;
  check(rows <= kMostRows, "a vocabulary kernel over {} rows", rows);
  return {static_cast<unsigned>(num_chunks), static_cast<unsigned>(rows), 1};
}

std::int64_t num_chunks_of(std::int64_t cols) {
  return std::max<std::int64_t>(1, (cols + kChunk - 1) / kChunk);
}

}  // namespace

void CudaBackend::top_k(ConstTensorView logits, std::int64_t first_id, TensorView values,
                        TensorView ids) {
  expect_matrix("top_k's logits", logits, DType::kFloat32);
  expect_matrix("top_k's values", values, DType::kFloat32);
  const std::int64_t rows = logits.size(0);
  const std::int64_t cols = logits.size(1);
  const std::int64_t k = values.size(1);
  expect_tensor("top_k's values", values, DType::kFloat32, Shape{rows, k});
  expect_tensor("top_k's ids", ids, DType::kInt32, Shape{rows, k});
  check(k <= kMostTop, "the {} best, at most {} are supported", k, kMostTop);
  check(cols <= 0x7fffffff, "top_k over {} columns", cols);
  if (rows == 0 || k == 0) {
    return;
  }
  TopKArrays arrays = {
      .logits = logits.data<float>(),
      .logits_stride = logits.row_stride(),
      .cols = cols,
      .first_id = first_id,
      .k = static_cast<int>(k),
      .values = values.data<float>(),
      .values_stride = values.row_stride(),
      .ids = ids.data<std::int32_t>(),
      .ids_stride = ids.row_stride(),
      .chunk_keys = nullptr,
      .num_chunks = static_cast<int>(num_chunks_of(cols)),
      .chunk_k = static_cast<int>(k),
  };
  if (arrays.num_chunks > 1) {
    arrays.chunk_keys = static_cast<Key*>(
        scratch(rows * arrays.num_chunks * k * static_cast<std::int64_t>(sizeof(Key))));
    top_k_chunks_kernel<<<chunk_grid(arrays.num_chunks, rows), kTopThreads, 0, cuda_stream()>>>(
        arrays);
    check_launch("top_k, chunks");
  }
  top_k_rows_kernel<<<static_cast<unsigned>(rows), kTopThreads, 0, cuda_stream()>>>(arrays);
  check_launch("top_k");
}

void CudaBackend::log_sum_exp_partials(ConstTensorView logits, TensorView partials) {
  expect_matrix("log_sum_exp_partials' logits", logits, DType::kFloat32);
  const std::int64_t rows = logits.size(0);
  const std::int64_t cols = logits.size(1);
  expect_tensor("partials", partials, DType::kFloat32, Shape{rows, 2});
  if (rows == 0) {
    return;
  }
  const std::int64_t num_chunks = num_chunks_of(cols);
  float* to = partials.data<float>();
  std::int64_t to_stride = partials.row_stride();
  if (num_chunks > 1) {
    to_stride = num_chunks * 2;
    to = static_cast<float*>(scratch(rows * to_stride * static_cast<std::int64_t>(sizeof(float))));
  }
  log_sum_exp_chunks_kernel<<<chunk_grid(num_chunks, rows), kTopThreads, 0, cuda_stream()>>>(
      logits.data<float>(), logits.row_stride(), cols, to, to_stride);
  check_launch("log_sum_exp_partials, chunks");
  if (num_chunks > 1) {
    const auto blocks = static_cast<unsigned>((rows + kBlockThreads - 1) / kBlockThreads);
    log_sum_exp_rows_kernel<<<blocks, kBlockThreads, 0, cuda_stream()>>>(
        to, num_chunks, rows, partials.data<float>(), partials.row_stride());
    check_launch("log_sum_exp_partials");
  }
}

void CudaBackend::merge_top_k(ConstTensorView part_values, ConstTensorView part_ids,
                              ConstTensorView partials, TensorView values, TensorView ids) {
  check(part_values.shape().rank() == 3, "part_values has {} dimensions, expected 3",
        part_values.shape().rank());
  expect_matrix("merge_top_k's values", values, DType::kFloat32);
  const std::int64_t parts = part_values.size(0);
  const std::int64_t rows = part_values.size(1);
  const std::int64_t k_in = part_values.size(2);
  const std::int64_t k_out = values.size(1);
  expect_tensor("part_values", part_values, DType::kFloat32, Shape{parts, rows, k_in});
  expect_tensor("part_ids", part_ids, DType::kInt32, Shape{parts, rows, k_in});
  expect_tensor("merge_top_k's values", values, DType::kFloat32, Shape{rows, k_out});
  expect_tensor("merge_top_k's ids", ids, DType::kInt32, Shape{rows, k_out});
  if (!partials.empty()) {
    expect_tensor("partials", partials, DType::kFloat32, Shape{parts, rows, 2});
  }
  check(k_out <= kMostTop, "the {} best, at most {} are supported", k_out, kMostTop);
  check(parts * k_in <= 0x7fffffff, "{} candidates of {} parts", k_in, parts);
  if (rows == 0 || k_out == 0) {
    return;
  }
  const MergeArrays arrays = {
      .part_values = part_values.data<float>(),
      .part_ids = part_ids.data<std::int32_t>(),
      .part_values_stride = part_values.row_stride(),
      .part_ids_stride = part_ids.row_stride(),
      .partials = partials.empty() ? nullptr : partials.data<float>(),
      .partials_stride = partials.row_stride(),
      .parts = parts,
      .k_in = static_cast<int>(k_in),
      .k_out = static_cast<int>(k_out),
      .values = values.data<float>(),
      .values_stride = values.row_stride(),
      .ids = ids.data<std::int32_t>(),
      .ids_stride = ids.row_stride(),
  };
  merge_top_k_kernel<<<static_cast<unsigned>(rows), kTopThreads, 0, cuda_stream()>>>(arrays);
  check_launch("merge_top_k");
}

}  // namespace kdtree
