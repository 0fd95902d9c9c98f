// Writing into the caches: the rows of a step, and the accepted rows of a tree moved together.
#include <cstring>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/shapes.h"

namespace kdtree {
namespace {

void check_path(std::int64_t sequence, const std::int32_t* path, std::int64_t length) {
  for (std::int64_t i = 0; i < length; ++i) {
    check(path[i] >= i && (i == 0 || path[i] > path[i - 1]),
          "path of sequence {}: node {} at place {}; nodes must ascend and not lie before their "
          "place",
          sequence, path[i], i);
  }
}

}  // namespace

void CpuBackend::cache_write(const CacheWriteParams& params) {
  expect_matrix("cache_write's values", params.values, DType::kFloat32);
  check(params.cache.shape().rank() == 3, "the cache has {} dimensions, expected 3",
        params.cache.shape().rank());
  const std::int64_t num_slots = params.cache.size(0);
  const std::int64_t capacity = params.cache.size(1);
  const std::int64_t width = params.values.size(1);
  expect_tensor("cache", params.cache, DType::kFloat32, Shape{num_slots, capacity, width});
  expect_tensor("cache_write's values", params.values, DType::kFloat32,
                Shape{params.batch.num_rows, width});
  const BatchIndex index = read_batch(params.batch, num_slots, capacity);
  if (width == 0) {
    return;
  }
  for (std::int64_t r = 0; r < params.batch.num_rows; ++r) {
    const std::int64_t s = index.sequence(r);
    const std::int64_t position = index.prefix(s) + r - index.first_row(s);
    std::memcpy(params.cache.row<float>(index.slot(s)) + position * width,
                params.values.row<float>(r), static_cast<std::size_t>(width) * sizeof(float));
  }
}

void CpuBackend::compact(const CompactParams& params) {
  check(params.cache.shape().rank() == 3, "the cache has {} dimensions, expected 3",
        params.cache.shape().rank());
  const std::int64_t num_slots = params.cache.size(0);
  const std::int64_t capacity = params.cache.size(1);
  const std::int64_t width = params.cache.size(2);
  expect_tensor("cache", params.cache, DType::kFloat32, params.cache.shape());
  expect_matrix("paths", params.paths, DType::kInt32);
  const std::int64_t num_sequences = params.paths.size(0);
  const std::int64_t max_path = params.paths.size(1);
  const auto slots = read_indices("slots", params.slots, num_sequences);
  const auto prefixes = read_indices("prefix_lengths", params.prefix_lengths, num_sequences);
  const auto lengths = read_indices("path_lengths", params.path_lengths, num_sequences);
  // All checks first: a malformed call changes nothing.
  for (std::int64_t s = 0; s < num_sequences; ++s) {
    const auto i = static_cast<std::size_t>(s);
    check(slots[i] >= 0 && slots[i] < num_slots, "sequence {} has slot {} of {}", s, slots[i],
          num_slots);
    check(lengths[i] >= 0 && lengths[i] <= max_path,
          "sequence {} has a path of {} nodes, max_path is {}", s, lengths[i], max_path);
    check_path(s, params.paths.row<std::int32_t>(s), lengths[i]);
    const std::int32_t last =
        lengths[i] == 0 ? -1 : params.paths.row<std::int32_t>(s)[lengths[i] - 1];
    check(prefixes[i] >= 0 && std::int64_t{prefixes[i]} + last < capacity,
          "sequence {} has {} committed rows and accepts node {}, the cache's capacity is {}", s,
          prefixes[i], last, capacity);
  }
  for (std::int64_t s = 0; s < num_sequences; ++s) {
    const auto i = static_cast<std::size_t>(s);
    const std::int32_t* path = params.paths.row<std::int32_t>(s);
    float* first = params.cache.row<float>(slots[i]) + prefixes[i] * width;
    // Ascending order reads every row before it is written: row n is written n-th, and the sources
    // still to be read then are path[n] >= n and higher ones.
    for (std::int64_t n = 0; n < lengths[i]; ++n) {
      if (path[n] != n && width > 0) {
        std::memcpy(first + n * width, first + path[n] * width,
                    static_cast<std::size_t>(width) * sizeof(float));
      }
    }
  }
}

}  // namespace kdtree
