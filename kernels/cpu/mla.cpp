// The two products with kv_b that absorbed multi-head latent attention needs around the attention
// itself.
#include <algorithm>
#include <cstddef>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/shapes.h"
#include "kernels/cpu/weights.h"

namespace kdtree {
namespace {

void check_kv_b(const WeightView& kv_b, const MlaShape& shape) {
  check(kv_b.format != WeightFormat::kInt4Group, "kv_b in INT4 is not supported");
  check(kv_b.out_features == shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim) &&
            kv_b.in_features == shape.kv_lora_rank,
        "kv_b is [{}, {}], expected {} heads * ({} + {}) rows and kv_lora_rank {}",
        kv_b.out_features, kv_b.in_features, shape.num_heads, shape.qk_nope_head_dim,
        shape.v_head_dim, shape.kv_lora_rank);
  check_weight("kv_b", kv_b);
}

// The value rows of head h: the last v_head_dim of its rows.
WeightView value_rows(const WeightView& kv_b, const MlaShape& shape, std::int64_t h) {
  const std::int64_t first =
      h * (shape.qk_nope_head_dim + shape.v_head_dim) + shape.qk_nope_head_dim;
  const std::int64_t element = kv_b.format == WeightFormat::kFloat32 ? 4 : 2;
  WeightView rows = kv_b;
  rows.out_features = shape.v_head_dim;
  rows.data = static_cast<const std::byte*>(kv_b.data) + first * kv_b.in_features * element;
  return rows;
}

}  // namespace

void CpuBackend::absorb_query(const WeightView& kv_b, const MlaShape& shape, ConstTensorView q,
                              TensorView query) {
  check_kv_b(kv_b, shape);
  expect_matrix("absorb_query's q", q, DType::kFloat32);
  const std::int64_t rows = q.size(0);
  expect_tensor("absorb_query's q", q, DType::kFloat32,
                Shape{rows, shape.num_heads * shape.qk_head_dim()});
  expect_tensor("absorb_query's query", query, DType::kFloat32,
                Shape{rows, shape.num_heads * shape.latent_dim()});
  if (rows == 0 || shape.num_heads == 0) {
    return;
  }
  const LoopWork work = {shape.num_heads,
                         rows * shape.num_heads * shape.qk_nope_head_dim * shape.kv_lora_rank};
  parallel_for(num_threads_, work, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t h = begin; h < end; ++h) {
      const float* head = q.data<float>() + h * shape.qk_head_dim();
      float* absorbed = query.data<float>() + h * shape.latent_dim();
      linear_transposed(kv_b, {.first_row = h * (shape.qk_nope_head_dim + shape.v_head_dim),
                               .num_factors = shape.qk_nope_head_dim,
                               .factors = {.base = head, .stride = q.row_stride()},
                               .out = {.base = absorbed, .stride = query.row_stride()},
                               .num_rows = rows});
      for (std::int64_t r = 0; r < rows; ++r) {
        std::copy_n(head + r * q.row_stride() + shape.qk_nope_head_dim, shape.qk_rope_head_dim,
                    absorbed + r * query.row_stride() + shape.kv_lora_rank);
      }
    }
  });
}

void CpuBackend::expand_value(const WeightView& kv_b, const MlaShape& shape,
                              ConstTensorView o_latent, TensorView out) {
  check_kv_b(kv_b, shape);
  expect_matrix("expand_value's o_latent", o_latent, DType::kFloat32);
  const std::int64_t rows = o_latent.size(0);
  expect_tensor("expand_value's o_latent", o_latent, DType::kFloat32,
                Shape{rows, shape.num_heads * shape.kv_lora_rank});
  expect_tensor("expand_value's out", out, DType::kFloat32,
                Shape{rows, shape.num_heads * shape.v_head_dim});
  if (rows == 0 || shape.num_heads == 0) {
    return;
  }
  const LoopWork work = {shape.num_heads,
                         rows * shape.num_heads * shape.v_head_dim * shape.kv_lora_rank};
  parallel_for(num_threads_, work, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t h = begin; h < end; ++h) {
      const WeightView w = value_rows(kv_b, shape, h);
      const LinearProduct product = {
          .w = w,
          .x = {.base = o_latent.data<float>() + h * shape.kv_lora_rank,
                .stride = o_latent.row_stride()},
          .y = {.base = out.data<float>() + h * shape.v_head_dim, .stride = out.row_stride()},
          .num_rows = rows};
      linear_outputs(product, 0, shape.v_head_dim);
    }
  });
}

}  // namespace kdtree
