#include <cmath>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/shapes.h"

namespace kdtree {
namespace {

KDTREE_SIMD_CLONES
float sum_of_squares(const float* x, std::int64_t n) {
  Lanes sums[1] = {};
  const float* const operand[1] = {x};
  accumulate_dots<1, 1>(operand, operand, n, sums);
  return sum_lanes(sums[0]);
}

}  // namespace

void CpuBackend::rms_norm(ConstTensorView x, ConstTensorView weight, float eps, TensorView y) {
  expect_matrix("rms_norm's x", x, DType::kFloat32);
  const std::int64_t rows = x.size(0);
  const std::int64_t cols = x.size(1);
  expect_tensor("rms_norm's weight", weight, DType::kFloat32, Shape{cols});
  expect_tensor("rms_norm's y", y, DType::kFloat32, x.shape());
  const auto weights = weight.span<float>();
  parallel_for(num_threads_, {rows, 2 * rows * cols}, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const float* from = x.row<float>(r);
      float* to = y.row<float>(r);
      const float mean = sum_of_squares(from, cols) / static_cast<float>(cols);
      const float scale = 1.0F / std::sqrt(mean + eps);
      for (std::int64_t c = 0; c < cols; ++c) {
        to[c] = from[c] * scale * weights[static_cast<std::size_t>(c)];
      }
    }
  });
}

void CpuBackend::add_rms_norm(TensorView x, ConstTensorView delta, ConstTensorView weight,
                              float eps, TensorView y) {
  add(x, delta);
  rms_norm(x, weight, eps, y);
}

}  // namespace kdtree
