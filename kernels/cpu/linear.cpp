#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/shapes.h"
#include "kernels/cpu/weights.h"

namespace kdtree {

void CpuBackend::linear(const WeightView& w, ConstTensorView x, TensorView y) {
  check_weight("linear's w", w);
  expect_matrix("linear's x", x, DType::kFloat32);
  const std::int64_t rows = x.size(0);
  expect_tensor("linear's x [rows, in_features]", x, DType::kFloat32, Shape{rows, w.in_features});
  expect_tensor("linear's y [rows, out_features]", y, DType::kFloat32, Shape{rows, w.out_features});
  if (rows == 0 || w.out_features == 0) {
    return;
  }
  const LinearProduct product = {.w = w,
                                 .x = {.base = x.data<float>(), .stride = x.row_stride()},
                                 .y = {.base = y.data<float>(), .stride = y.row_stride()},
                                 .num_rows = rows};
  // Whole tiles of output features a thread.
  const LoopWork work = {
      .count = w.out_features, .multiply_adds = rows * w.out_features * w.in_features, .unit = 4};
  parallel_for(num_threads_, work,
               [&](std::int64_t begin, std::int64_t end) { linear_outputs(product, begin, end); });
}

}  // namespace kdtree
