// rms_norm and add_rms_norm: one block a row.
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/shapes.h"

namespace kdtree {
namespace {

constexpr int kNormThreads = 512;
constexpr int kWarp = 32;
constexpr int kWarps = kNormThreads / kWarp;

// The block's sum, in every thread, in an order that the number of threads alone fixes.
__device__ float block_sum(float value) {
  __shared__ float warp_sums[kWarps];
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffU, value, offset);
  }
  if (threadIdx.x % kWarp == 0) {
    warp_sums[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) {
    sum += warp_sums[w];
  }
  return sum;
}

// to = x * scale * weight for a row whose squares this thread has summed over its own columns.
// Every thread reads and writes its own columns only, so that to may be x.
template <class T>
__device__ void normalize_row(const T* x, const float* weight, float eps, float squares,
                              std::int64_t cols, T* to) {
  const float mean = block_sum(squares) / static_cast<float>(cols);
  const float scale = 1.0F / sqrtf(mean + eps);
  for (std::int64_t c = threadIdx.x; c < cols; c += kNormThreads) {
    to[c] = from_float<T>(to_float(x[c]) * scale * weight[c]);
  }
}

template <class T>
__global__ void __launch_bounds__(kNormThreads)
    rms_norm_kernel(const T* x, std::int64_t x_stride, const float* weight, float eps, T* y,
                    std::int64_t y_stride, std::int64_t cols) {
  x += std::int64_t{blockIdx.x} * x_stride;
  y += std::int64_t{blockIdx.x} * y_stride;
  float squares = 0;
  for (std::int64_t c = threadIdx.x; c < cols; c += kNormThreads) {
    const float value = to_float(x[c]);
    squares = fmaf(value, value, squares);  // written out: both kernels must round alike
  }
  normalize_row(x, weight, eps, squares, cols, y);
}

template <class T>
__global__ void __launch_bounds__(kNormThreads)
    add_rms_norm_kernel(T* x, std::int64_t x_stride, const T* delta, std::int64_t delta_stride,
                        const float* weight, float eps, T* y, std::int64_t y_stride,
                        std::int64_t cols) {
  x += std::int64_t{blockIdx.x} * x_stride;
  delta += std::int64_t{blockIdx.x} * delta_stride;
  y += std::int64_t{blockIdx.x} * y_stride;
  float squares = 0;
  for (std::int64_t c = threadIdx.x; c < cols; c += kNormThreads) {
    const T stored = from_float<T>(to_float(x[c]) + to_float(delta[c]));
    x[c] = stored;
    const float value = to_float(stored);  // what rms_norm would read
    squares = fmaf(value, value, squares);
  }
  normalize_row(x, weight, eps, squares, cols, y);
}

unsigned norm_blocks(std::int64_t rows) {
  check(rows <= 0x7fffffff, "a norm of {} rows", rows);
  return static_cast<unsigned>(rows);
}

const float* norm_weight(const ConstTensorView& weight, std::int64_t cols) {
  expect_tensor("rms_norm's weight", weight, DType::kFloat32, Shape{cols});
  check(weight.contiguous(), "rms_norm's weight must be contiguous");
  return weight.data<float>();
}

}  // namespace

void CudaBackend::rms_norm(ConstTensorView x, ConstTensorView weight, float eps, TensorView y) {
  expect_matrix("rms_norm's x", x, activation_dtype());
  const std::int64_t rows = x.size(0);
  const std::int64_t cols = x.size(1);
  const float* weights = norm_weight(weight, cols);
  expect_tensor("rms_norm's y", y, activation_dtype(), x.shape());
  if (rows == 0 || cols == 0) {
    return;
  }
  with_float_type(activation_dtype(), [&](auto type) {
    using T = decltype(type);
    rms_norm_kernel<T><<<norm_blocks(rows), kNormThreads, 0, cuda_stream()>>>(
        static_cast<const T*>(x.raw()), x.row_stride(), weights, eps, static_cast<T*>(y.raw()),
        y.row_stride(), cols);
  });
  check_launch("rms_norm");
}

void CudaBackend::add_rms_norm(TensorView x, ConstTensorView delta, ConstTensorView weight,
                               float eps, TensorView y) {
  expect_matrix("add_rms_norm's x", x, activation_dtype());
  const std::int64_t rows = x.size(0);
  const std::int64_t cols = x.size(1);
  expect_tensor("add_rms_norm's delta", delta, activation_dtype(), x.shape());
  const float* weights = norm_weight(weight, cols);
  expect_tensor("add_rms_norm's y", y, activation_dtype(), x.shape());
  if (rows == 0 || cols == 0) {
    return;
  }
  with_float_type(activation_dtype(), [&](auto type) {
    using T = decltype(type);
    add_rms_norm_kernel<T><<<norm_blocks(rows), kNormThreads, 0, cuda_stream()>>>(
        static_cast<T*>(x.raw()), x.row_stride(), static_cast<const T*>(delta.raw()),
        delta.row_stride(), weights, eps, static_cast<T*>(y.raw()), y.row_stride(), cols);
  });
  check_launch("add_rms_norm");
}

}  // namespace kdtree
