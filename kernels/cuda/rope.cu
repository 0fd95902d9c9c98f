#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/shapes.h"

namespace kdtree {
namespace {

struct RopeTable {
  const float* data;  // [num_positions, 2 * half]: cosines, then sines
  std::int64_t stride;
  std::int64_t num_positions;
  std::int64_t half;
};

struct RopeHeads {
  std::int64_t count;
  std::int64_t stride;
  std::int64_t pair_stride;  // from one pair to the next
  std::int64_t partner;      // from a pair's first element to its second
};

// A thread rotates whole pairs. A row whose position the table does not have stays as it is.
template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    rope_kernel(T* x, std::int64_t x_stride, const std::int32_t* positions, RopeTable table,
                RopeHeads heads) {
  const std::int64_t r = blockIdx.x;
  const std::int64_t position = positions[r];
  if (position < 0 || position >= table.num_positions) {
    return;
  }
  const float* cosines = table.data + position * table.stride;
  const float* sines = cosines + table.half;
  T* row = x + r * x_stride;
  for_columns(heads.count * table.half, [&](std::int64_t pair) {
    const std::int64_t head = pair / table.half;
    const std::int64_t i = pair - head * table.half;
    T* first = row + head * heads.stride + i * heads.pair_stride;
    const float a = to_float(first[0]);
    const float b = to_float(first[heads.partner]);
    first[0] = from_float<T>(a * cosines[i] - b * sines[i]);
    first[heads.partner] = from_float<T>(a * sines[i] + b * cosines[i]);
  });
}

}  // namespace

void CudaBackend::rope(const RopeParams& params) {
  const TensorView& x = params.x;
  expect_matrix("rope's x", x, activation_dtype());
  expect_matrix("rope's cos_sin", params.cos_sin, DType::kFloat32);
  const std::int64_t rows = x.size(0);
  const std::int64_t rope_dim = params.cos_sin.size(1);
  const std::int64_t half = rope_dim / 2;
  const std::int64_t num_heads = params.num_heads;
  check(rope_dim % 2 == 0, "rope_dim {} is odd", rope_dim);
  check(num_heads >= 0 && params.head_stride >= 0 && params.offset >= 0 &&
            (num_heads <= 1 || params.head_stride >= rope_dim),
        "rope with {} heads of {} values, head_stride {}, offset {}", num_heads, rope_dim,
        params.head_stride, params.offset);
  check(num_heads == 0 ||
            params.offset + (num_heads - 1) * params.head_stride + rope_dim <= x.size(1),
        "rope's {} heads of {} values, head_stride {}, offset {} do not fit a row of {}", num_heads,
        rope_dim, params.head_stride, params.offset, x.size(1));
  const std::int32_t* positions = device_indices("rope's positions", params.positions, rows);
  if (rows == 0 || num_heads == 0 || half == 0) {
    return;
  }
  const bool interleaved = params.layout == RopeLayout::kInterleaved;
  const RopeTable table = {params.cos_sin.data<float>(), params.cos_sin.row_stride(),
                           params.cos_sin.size(0), half};
  const RopeHeads heads = {num_heads, params.head_stride, interleaved ? 2 : 1,
                           interleaved ? 1 : half};
  with_float_type(activation_dtype(), [&](auto type) {
    using T = decltype(type);
    rope_kernel<T><<<row_grid(rows, num_heads * half), kBlockThreads, 0, cuda_stream()>>>(
        static_cast<T*>(x.raw()) + params.offset, x.row_stride(), positions, table, heads);
  });
  check_launch("rope");
}

}  // namespace kdtree
