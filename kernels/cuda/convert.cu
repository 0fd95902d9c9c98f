#include "kernels/cuda/convert.h"
#include "kernels/cuda/cuda_call.h"
#include "kernels/cuda/elements.h"

namespace kdtree {
namespace {

struct Strides {
  std::int64_t from_row;
  std::int64_t from_head;
  std::int64_t to_row;
  std::int64_t to_head;
};

template <class From, class To>
__global__ void __launch_bounds__(kBlockThreads)
    convert_kernel(HeadsShape shape, const From* from, To* to, Strides strides) {
  const std::int64_t row = blockIdx.x;
  from += row * strides.from_row;
  to += row * strides.to_row;
  for_columns(shape.heads * shape.cols, [&](std::int64_t i) {
    std::int64_t head = 0;
    std::int64_t column = i;
    if (shape.heads > 1) {
      head = i / shape.cols;
      column = i - head * shape.cols;
    }
    to[head * strides.to_head + column] =
        from_float<To>(to_float(from[head * strides.from_head + column]));
  });
}

}  // namespace

void convert(const HeadsShape& shape, const HeadsView<const void>& from, const HeadsView<void>& to,
             cudaStream_t stream) {
  if (shape.rows == 0 || shape.heads == 0 || shape.cols == 0) {
    return;
  }
  const Strides strides = {from.row_stride, from.head_stride, to.row_stride, to.head_stride};
  const dim3 grid = row_grid(shape.rows, shape.heads * shape.cols);
  with_float_type(from.dtype, [&](auto from_type) {
    with_float_type(to.dtype, [&](auto to_type) {
      using From = decltype(from_type);
      using To = decltype(to_type);
      convert_kernel<From, To><<<grid, kBlockThreads, 0, stream>>>(
          shape, static_cast<const From*>(from.data), static_cast<To*>(to.data), strides);
    });
  });
  check_launch("convert");
}

}  // namespace kdtree
