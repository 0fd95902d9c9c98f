// linear: y = W x by cuBLAS, for every weight format.
//
// bf16 matrices with bf16 activations are multiplied as they are. Everything else is multiplied in
// float32, with operands widened exactly into scratch: float32 activations (the exact mode),
// float32 matrices (the router), and INT4 matrices, whose values code * scale bf16 cannot hold.
#include <algorithm>
#include <cstddef>

#include "kernels/cpu/weights.h"
#include "kernels/cuda/convert.h"
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/int4_layout.h"
#include "kernels/cuda/shapes.h"

namespace kdtree {
namespace {

constexpr std::int64_t kFloatBytes = 4;
// Scratch for widened rows of a matrix; a larger matrix is multiplied in parts.
constexpr std::int64_t kWidenedBytes = std::int64_t{64} << 20;

// Rows [first, first + count) of a matrix as float32 at `to`.
void widen_rows(const WeightView& w, std::int64_t first, std::int64_t count, void* to,
                cudaStream_t stream) {
  if (w.format == WeightFormat::kInt4Group) {
    expand_int4_rows(w, first, count, DType::kFloat32, to, stream);
    return;
  }
  const std::int64_t skip = first * w.in_features * dtype_bytes(DType::kBFloat16);
  convert({.rows = count, .cols = w.in_features},
          {.data = static_cast<const std::byte*>(w.data) + skip,
           .dtype = DType::kBFloat16,
           .row_stride = w.in_features},
          {.data = to, .dtype = DType::kFloat32, .row_stride = w.in_features}, stream);
}

}  // namespace

void CudaBackend::linear(const WeightView& w, ConstTensorView x, TensorView y) {
  check_weight("linear's w", w);
  expect_matrix("linear's x", x, activation_dtype());
  const std::int64_t rows = x.size(0);
  expect_tensor("linear's x [rows, in_features]", x, activation_dtype(),
                Shape{rows, w.in_features});
  const DType y_dtype = y.dtype() == DType::kFloat32 ? DType::kFloat32 : activation_dtype();
  expect_tensor("linear's y [rows, out_features]", y, y_dtype, Shape{rows, w.out_features});
  if (rows == 0 || w.out_features == 0) {
    return;
  }
  if (w.in_features == 0) {
    const std::int64_t element = dtype_bytes(y_dtype);
    check_cuda(cudaMemset2DAsync(y.raw(), static_cast<std::size_t>(y.row_stride() * element), 0,
                                 static_cast<std::size_t>(w.out_features * element),
                                 static_cast<std::size_t>(rows), stream_),
               "linear without inputs");
    return;
  }
  const Gemm product = {.rows = rows,
                        .out = w.out_features,
                        .in = w.in_features,
                        .dtype = activation_dtype(),
                        .y_dtype = y_dtype,
                        .w = w.data,
                        .w_stride = w.in_features,
                        .x = x.raw(),
                        .x_stride = x.row_stride(),
                        .y = y.raw(),
                        .y_stride = y.row_stride()};
  if (w.format == WeightFormat::kBFloat16 && !is_float32()) {
    gemm(product);
  } else {
    linear_float32(w, product);
  }
}

void CudaBackend::linear_float32(const WeightView& w, const Gemm& product) {
  const bool widens_x = product.dtype != DType::kFloat32;
  const bool narrows_y = product.y_dtype != DType::kFloat32;
  const bool widens_w = w.format != WeightFormat::kFloat32;
  // Parts of a matrix depend on its own sizes alone.
  const std::int64_t row_bytes = w.in_features * kFloatBytes;
  const std::int64_t part =
      widens_w ? std::clamp<std::int64_t>(kWidenedBytes / row_bytes, 1, w.out_features)
               : w.out_features;
  const std::int64_t x_bytes = widens_x ? aligned_bytes(product.rows * row_bytes) : 0;
  const std::int64_t y_bytes =
      narrows_y ? aligned_bytes(product.rows * w.out_features * kFloatBytes) : 0;
  const std::int64_t w_bytes = widens_w ? part * row_bytes : 0;
  auto* wide_x = static_cast<std::byte*>(scratch(x_bytes + y_bytes + w_bytes));
  std::byte* wide_y = wide_x + x_bytes;
  std::byte* wide_w = wide_y + y_bytes;

  Gemm wide = product;
  wide.dtype = DType::kFloat32;
  wide.y_dtype = DType::kFloat32;
  if (widens_x) {
    wide.x = wide_x;
    wide.x_stride = w.in_features;
    convert({.rows = product.rows, .cols = w.in_features},
            {.data = product.x, .dtype = product.dtype, .row_stride = product.x_stride},
            {.data = wide_x, .dtype = DType::kFloat32, .row_stride = wide.x_stride}, stream_);
  }
  if (narrows_y) {
    wide.y_stride = w.out_features;
  }
  auto* y = narrows_y ? wide_y : static_cast<std::byte*>(product.y);
  for (std::int64_t first = 0; first < w.out_features; first += part) {
    wide.out = std::min(part, w.out_features - first);
    wide.y = y + first * kFloatBytes;
    if (widens_w) {
      widen_rows(w, first, wide.out, wide_w, stream_);
      wide.w = wide_w;
    }
    gemm(wide);
  }
  if (narrows_y) {
    convert({.rows = product.rows, .cols = w.out_features},
            {.data = wide_y, .dtype = DType::kFloat32, .row_stride = wide.y_stride},
            {.data = product.y, .dtype = product.y_dtype, .row_stride = product.y_stride}, stream_);
  }
}

void CudaBackend::gemm(const Gemm& product) {
  // A cuBLAS handle is a cuBLASLt handle as well.
  gemm_plans_.run(reinterpret_cast<cublasLtHandle_t>(cublas_), product,
                  {.data = cublas_workspace_, .bytes = kCublasWorkspaceBytes}, stream_);
}

}  // namespace kdtree
