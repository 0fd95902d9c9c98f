// Shape checks of the CUDA ops. They look at shapes only: the values of index tensors lie on the
// device, where kernels leave out what points outside of a tensor.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/backend.h"
#include "kernels/cpu/shapes.h"

namespace kdtree {

// The device pointer of a contiguous int32 tensor [count].
inline const std::int32_t* device_indices(std::string_view name, const ConstTensorView& view,
                                          std::int64_t count) {
  expect_tensor(name, view, DType::kInt32, Shape{count});
  check(view.contiguous(), "{} must be contiguous", name);
  return view.data<std::int32_t>();
}

inline std::int32_t* device_indices(std::string_view name, const TensorView& view,
                                    std::int64_t count) {
  return const_cast<std::int32_t*>(device_indices(name, ConstTensorView(view), count));
}

// The index arrays of a TreeBatch as kernels take them.
struct BatchPointers {
  const std::int32_t* sequence_index;  // [rows]
  const std::int32_t* slots;           // [sequences]
  const std::int32_t* prefix_lengths;  // [sequences]
  const std::int32_t* row_offsets;     // [sequences + 1]
  std::int64_t num_sequences;
};

inline BatchPointers batch_pointers(const TreeBatch& batch) {
  check(batch.num_sequences >= 0 && batch.num_rows >= 0, "batch of {} sequences and {} rows",
        batch.num_sequences, batch.num_rows);
  return {
      .sequence_index = device_indices("sequence_index", batch.sequence_index, batch.num_rows),
      .slots = device_indices("slots", batch.slots, batch.num_sequences),
      .prefix_lengths = device_indices("prefix_lengths", batch.prefix_lengths, batch.num_sequences),
      .row_offsets = device_indices("row_offsets", batch.row_offsets, batch.num_sequences + 1),
      .num_sequences = batch.num_sequences,
  };
}

// A cache [slots, capacity, width].
inline void expect_cache(std::string_view name, const ConstTensorView& cache, DType dtype) {
  if (cache.dtype() != dtype || cache.shape().rank() != 3) {
    fail("{} must be {} with three dimensions, got {} {}", name, dtype_name(dtype),
         dtype_name(cache.dtype()), cache.shape().to_string());
  }
}

}  // namespace kdtree
