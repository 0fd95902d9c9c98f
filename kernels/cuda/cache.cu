// Writing into the caches: the rows of a step, and the accepted rows of a tree moved together.
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/row_copy.h"
#include "kernels/cuda/shapes.h"

namespace kdtree {
namespace {

// A cache [slots, capacity, width] in units of a copy.
template <class Unit>
struct CacheUnits {
  Unit* data;
  std::int64_t slot_stride;
  std::int64_t width;
  std::int64_t num_slots;
  std::int64_t capacity;

  __device__ Unit* row(std::int64_t slot, std::int64_t position) const {
    return data + slot * slot_stride + position * width;
  }
};

// A row whose place lies outside of the cache is left out.
template <class Unit>
__global__ void __launch_bounds__(kBlockThreads)
    cache_write_kernel(const Unit* values, std::int64_t values_stride, CacheUnits<Unit> cache,
                       BatchPointers batch) {
  const std::int64_t r = blockIdx.x;
  const std::int64_t s = batch.sequence_index[r];
  if (s < 0 || s >= batch.num_sequences) {
    return;
  }
  const std::int64_t slot = batch.slots[s];
  const std::int64_t place = r - batch.row_offsets[s];
  const std::int64_t position = batch.prefix_lengths[s] + place;
  if (slot < 0 || slot >= cache.num_slots || place < 0 || position < 0 ||
      position >= cache.capacity) {
    return;
  }
  const Unit* from = values + r * values_stride;
  Unit* to = cache.row(slot, position);
  for_columns(cache.width, [&](std::int64_t c) { to[c] = from[c]; });
}

struct Paths {
  const std::int32_t* slots;
  const std::int32_t* prefix_lengths;
  const std::int32_t* path_lengths;
  const std::int32_t* nodes;  // [sequences, max_path]
  std::int64_t stride;
  std::int64_t max_path;
};

// Whether the path of sequence s is sound; the same answer in every thread of the block.
__device__ bool sound_path(const Paths& paths, std::int64_t s, std::int64_t num_slots,
                           std::int64_t capacity) {
  const std::int64_t slot = paths.slots[s];
  const std::int64_t prefix = paths.prefix_lengths[s];
  const std::int64_t length = paths.path_lengths[s];
  bool sound =
      slot >= 0 && slot < num_slots && prefix >= 0 && length >= 0 && length <= paths.max_path;
  if (sound) {
    const std::int32_t* path = paths.nodes + s * paths.stride;
    for (std::int64_t i = threadIdx.x; i < length; i += blockDim.x) {
      sound =
          sound && path[i] >= i && (i == 0 || path[i] > path[i - 1]) && prefix + path[i] < capacity;
    }
  }
  return __syncthreads_and(sound ? 1 : 0) != 0;
}

// A thread moves its columns of all rows, so that blocks and threads need not wait for each other.
// It reads a group of rows before it writes them, and groups ascend: row n is written after the
// reads of rows path[0..n], and what is read later lies at path[m] >= m > n.
template <class Unit>
__global__ void __launch_bounds__(kBlockThreads)
    compact_kernel(CacheUnits<Unit> cache, Paths paths) {
  constexpr int kGroup = 8;
  const std::int64_t s = blockIdx.x;
  if (!sound_path(paths, s, cache.num_slots, cache.capacity)) {
    return;  // nothing of a malformed path is moved
  }
  const std::int64_t length = paths.path_lengths[s];
  const std::int32_t* path = paths.nodes + s * paths.stride;
  Unit* first_row = cache.row(paths.slots[s], paths.prefix_lengths[s]);
  for_columns(cache.width, [&](std::int64_t c) {
    Unit* column = first_row + c;
    for (std::int64_t first = 0; first < length; first += kGroup) {
      Unit staged[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (first + i < length) {
          staged[i] = column[path[first + i] * cache.width];
        }
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (first + i < length && path[first + i] != first + i) {
          column[(first + i) * cache.width] = staged[i];
        }
      }
    }
  });
}

template <class Unit>
CacheUnits<Unit> cache_units(const TensorView& cache) {
  const std::int64_t element = dtype_bytes(cache.dtype());
  const auto unit = static_cast<std::int64_t>(sizeof(Unit));
  return {.data = static_cast<Unit*>(cache.raw()),
          .slot_stride = cache.row_stride() * element / unit,
          .width = cache.size(2) * element / unit,
          .num_slots = cache.size(0),
          .capacity = cache.size(1)};
}

}  // namespace

void CudaBackend::cache_write(const CacheWriteParams& params) {
  expect_matrix("cache_write's values", params.values, activation_dtype());
  expect_cache("cache", params.cache, activation_dtype());
  const std::int64_t rows = params.batch.num_rows;
  const std::int64_t width = params.values.size(1);
  expect_tensor("cache", params.cache, activation_dtype(),
                Shape{params.cache.size(0), params.cache.size(1), width});
  expect_tensor("cache_write's values", params.values, activation_dtype(), Shape{rows, width});
  const BatchPointers batch = batch_pointers(params.batch);
  if (rows == 0 || width == 0) {
    return;
  }
  const std::int64_t element = dtype_bytes(activation_dtype());
  const std::int64_t values_stride = params.values.row_stride() * element;
  const int unit =
      copy_unit_bytes(params.values.raw(), params.cache.raw(),
                      {width * element, values_stride, params.cache.row_stride() * element});
  with_copy_unit(unit, [&](auto unit_type) {
    using Unit = decltype(unit_type);
    const dim3 grid = row_grid(rows, width * element / unit);
    cache_write_kernel<Unit><<<grid, kBlockThreads, 0, cuda_stream()>>>(
        static_cast<const Unit*>(params.values.raw()), values_stride / unit,
        cache_units<Unit>(params.cache), batch);
  });
  check_launch("cache_write");
}

void CudaBackend::compact(const CompactParams& params) {
  expect_cache("cache", params.cache, activation_dtype());
  expect_matrix("paths", params.paths, DType::kInt32);
  const std::int64_t num_sequences = params.paths.size(0);
  const Paths paths = {
      .slots = device_indices("slots", params.slots, num_sequences),
      .prefix_lengths = device_indices("prefix_lengths", params.prefix_lengths, num_sequences),
      .path_lengths = device_indices("path_lengths", params.path_lengths, num_sequences),
      .nodes = params.paths.data<std::int32_t>(),
      .stride = params.paths.row_stride(),
      .max_path = params.paths.size(1)};
  const std::int64_t width = params.cache.size(2);
  if (num_sequences == 0 || width == 0) {
    return;
  }
  const std::int64_t element = dtype_bytes(activation_dtype());
  const int unit = copy_unit_bytes(params.cache.raw(), nullptr,
                                   {width * element, params.cache.row_stride() * element});
  with_copy_unit(unit, [&](auto unit_type) {
    using Unit = decltype(unit_type);
    const dim3 grid = row_grid(num_sequences, width * element / unit);
    compact_kernel<Unit>
        <<<grid, kBlockThreads, 0, cuda_stream()>>>(cache_units<Unit>(params.cache), paths);
  });
  check_launch("compact");
}

}  // namespace kdtree
