#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/shapes.h"

namespace kdtree {
namespace {

// Rotates the pairs (x[i * pair_stride], x[i * pair_stride + partner]) of one head.
void rotate(float* x, const float* cosines, const float* sines, std::int64_t half,
            RopeLayout layout) {
  const bool interleaved = layout == RopeLayout::kInterleaved;
  const std::int64_t pair_stride = interleaved ? 2 : 1;
  const std::int64_t partner = interleaved ? 1 : half;
  for (std::int64_t i = 0; i < half; ++i) {
    float& a = x[i * pair_stride];
    float& b = x[i * pair_stride + partner];
    const float rotated_a = a * cosines[i] - b * sines[i];
    const float rotated_b = a * sines[i] + b * cosines[i];
    a = rotated_a;
    b = rotated_b;
  }
}

}  // namespace

void CpuBackend::rope(const RopeParams& params) {
  const TensorView& x = params.x;
  expect_matrix("rope's x", x, DType::kFloat32);
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
  const auto positions = read_indices("rope's positions", params.positions, rows);
  check_indices("rope's positions", positions, params.cos_sin.size(0));
  const LoopWork work = {rows, rows * num_heads * rope_dim * 2};
  parallel_for(num_threads_, work, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const float* cosines = params.cos_sin.row<float>(positions[static_cast<std::size_t>(r)]);
      float* row = x.row<float>(r) + params.offset;
      for (std::int64_t h = 0; h < num_heads; ++h) {
        rotate(row + h * params.head_stride, cosines, cosines + half, half, params.layout);
      }
    }
  });
}

}  // namespace kdtree
