// Element types inside kernels, and launch sizes over rows. For .cu files.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "core/check.h"
#include "core/dtype.h"

namespace kdtree {

__device__ inline float to_float(float value) {
  return value;
}
__device__ inline float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

// Rounds to nearest, ties to even.
template <class T>
__device__ inline T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Calls body(T{}) with the C++ type of a float32 or bf16 tensor.
template <class Body>
void with_float_type(DType dtype, Body&& body) {
  if (dtype == DType::kFloat32) {
    body(float{});
  } else {
    check(dtype == DType::kBFloat16, "a tensor of {} where F32 or BF16 was expected",
          dtype_name(dtype));
    body(__nv_bfloat16{});
  }
}

inline constexpr int kBlockThreads = 256;

// Blocks for [rows, cols] elements: x is the row, y walks over the columns with for_columns.
inline dim3 row_grid(std::int64_t rows, std::int64_t cols) {
  constexpr std::int64_t kMaxRows = 0x7fffffff;
  constexpr std::int64_t kMaxParts = 65535;
  constexpr std::int64_t kColumnsPerBlock = 4 * kBlockThreads;
  check(rows >= 1 && rows <= kMaxRows, "a kernel over {} rows", rows);
  const std::int64_t parts = (cols + kColumnsPerBlock - 1) / kColumnsPerBlock;
  return {static_cast<unsigned>(rows),
          static_cast<unsigned>(std::clamp<std::int64_t>(parts, 1, kMaxParts)), 1};
}

// Calls body(c) for this thread's columns of a row_grid launch.
template <class Body>
__device__ inline void for_columns(std::int64_t cols, Body&& body) {
  const std::int64_t step = std::int64_t{gridDim.y} * blockDim.x;
  for (std::int64_t c = std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x; c < cols; c += step) {
    body(c);
  }
}

}  // namespace kdtree
