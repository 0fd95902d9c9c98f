// Copies between float32 and bf16, for operands that cuBLAS does not take as they are.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

namespace kdtree {

// Where [rows, heads, cols] float32 or bf16 elements lie; strides in elements, columns contiguous.
template <class Void>
struct HeadsView {
  Void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;  // unused for one head
};

struct HeadsShape {
  std::int64_t rows = 0;
  std::int64_t heads = 1;
  std::int64_t cols = 0;
};

// to = from. Widening is exact, narrowing rounds to nearest even. Any size may be 0.
void convert(const HeadsShape& shape, const HeadsView<const void>& from, const HeadsView<void>& to,
             cudaStream_t stream);

}  // namespace kdtree
