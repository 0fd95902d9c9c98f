// The two products with kv_b that absorbed multi-head latent attention needs around the attention
// itself: one batched product over the heads each, on kv_b where it lies.
#include <cstddef>

#include "kernels/cpu/weights.h"
#include "kernels/cuda/convert.h"
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/shapes.h"

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

DType weight_dtype(const WeightView& w) {
  return w.format == WeightFormat::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
}

// The elements [rows, heads, cols] of one operand of a product.
HeadsView<void> heads_of(void* data, DType dtype, std::int64_t row_stride,
                         std::int64_t head_stride) {
  return {.data = data, .dtype = dtype, .row_stride = row_stride, .head_stride = head_stride};
}

HeadsView<const void> read_only(const HeadsView<void>& view) {
  return {.data = view.data,
          .dtype = view.dtype,
          .row_stride = view.row_stride,
          .head_stride = view.head_stride};
}

}  // namespace

void CudaBackend::head_products(const WeightView& kv_b, std::int64_t first_element, Gemm product) {
  const DType stored = weight_dtype(kv_b);
  const bool direct = stored == activation_dtype();
  const std::int64_t skip = first_element * dtype_bytes(direct ? stored : DType::kFloat32);
  if (direct) {
    product.w = static_cast<const std::byte*>(kv_b.data) + skip;
    gemm(product);
    return;
  }
  // Mixed types: float32 throughout, with kv_b or the activations widened into scratch.
  constexpr std::int64_t kFloatBytes = 4;
  const bool widens_w = stored != DType::kFloat32;
  const bool widens_rows = !is_float32();
  const std::int64_t heads = product.batch;
  const std::int64_t w_bytes =
      widens_w ? aligned_bytes(kv_b.out_features * kv_b.in_features * kFloatBytes) : 0;
  const std::int64_t x_bytes =
      widens_rows ? aligned_bytes(product.rows * heads * product.in * kFloatBytes) : 0;
  const std::int64_t y_bytes = widens_rows ? product.rows * heads * product.out * kFloatBytes : 0;
  auto* wide_w = static_cast<std::byte*>(scratch(w_bytes + x_bytes + y_bytes));
  std::byte* wide_x = wide_w + w_bytes;
  std::byte* wide_y = wide_x + x_bytes;

  Gemm wide = product;
  wide.dtype = DType::kFloat32;
  wide.y_dtype = DType::kFloat32;
  wide.w = static_cast<const std::byte*>(kv_b.data) + skip;
  if (widens_w) {
    convert({.rows = kv_b.out_features, .cols = kv_b.in_features},
            {.data = kv_b.data, .dtype = stored, .row_stride = kv_b.in_features},
            heads_of(wide_w, DType::kFloat32, kv_b.in_features, 0), stream_);
    wide.w = wide_w + skip;
  }
  if (!widens_rows) {
    gemm(wide);
    return;
  }
  const auto x = heads_of(wide_x, DType::kFloat32, heads * product.in, product.in);
  const auto y = heads_of(wide_y, DType::kFloat32, heads * product.out, product.out);
  convert({.rows = product.rows, .heads = heads, .cols = product.in},
          {.data = product.x,
           .dtype = product.dtype,
           .row_stride = product.x_stride,
           .head_stride = product.x_batch_stride},
          x, stream_);
  wide.x = x.data;
  wide.x_stride = x.row_stride;
  wide.x_batch_stride = x.head_stride;
  wide.y = y.data;
  wide.y_stride = y.row_stride;
  wide.y_batch_stride = y.head_stride;
  gemm(wide);
  convert({.rows = product.rows, .heads = heads, .cols = product.out}, read_only(y),
          heads_of(product.y, product.y_dtype, product.y_stride, product.y_batch_stride), stream_);
}

void CudaBackend::absorb_query(const WeightView& kv_b, const MlaShape& shape, ConstTensorView q,
                               TensorView query) {
  check_kv_b(kv_b, shape);
  expect_matrix("absorb_query's q", q, activation_dtype());
  const std::int64_t rows = q.size(0);
  const std::int64_t heads = shape.num_heads;
  expect_tensor("absorb_query's q", q, activation_dtype(),
                Shape{rows, heads * shape.qk_head_dim()});
  expect_tensor("absorb_query's query", query, activation_dtype(),
                Shape{rows, heads * shape.latent_dim()});
  if (rows == 0 || heads == 0) {
    return;
  }
  const std::int64_t nope = shape.qk_nope_head_dim;
  const std::int64_t rank = shape.kv_lora_rank;
  const std::int64_t element = dtype_bytes(activation_dtype());
  // absorbed[r, h, c] = sum_n q[r, h, n] * W_UK[h][n, c]; without terms the sum is zero.
  if (nope == 0 && rank > 0) {
    check_cuda(
        cudaMemset2DAsync(query.raw(), static_cast<std::size_t>(query.row_stride() * element), 0,
                          static_cast<std::size_t>(query.size(1) * element),
                          static_cast<std::size_t>(rows), stream_),
        "absorb_query");
  } else if (rank > 0) {
    head_products(kv_b, 0,
                  {.rows = rows,
                   .out = rank,
                   .in = nope,
                   .batch = heads,
                   .dtype = activation_dtype(),
                   .y_dtype = activation_dtype(),
                   .w_transposed = true,
                   .w_stride = rank,
                   .w_batch_stride = (nope + shape.v_head_dim) * rank,
                   .x = q.raw(),
                   .x_stride = q.row_stride(),
                   .x_batch_stride = shape.qk_head_dim(),
                   .y = query.raw(),
                   .y_stride = query.row_stride(),
                   .y_batch_stride = shape.latent_dim()});
  }
  convert({.rows = rows, .heads = heads, .cols = shape.qk_rope_head_dim},
          {.data = static_cast<const std::byte*>(q.raw()) + nope * element,
           .dtype = activation_dtype(),
           .row_stride = q.row_stride(),
           .head_stride = shape.qk_head_dim()},
          heads_of(static_cast<std::byte*>(query.raw()) + rank * element, activation_dtype(),
                   query.row_stride(), shape.latent_dim()),
          stream_);
}

void CudaBackend::expand_value(const WeightView& kv_b, const MlaShape& shape,
                               ConstTensorView o_latent, TensorView out) {
  check_kv_b(kv_b, shape);
  expect_matrix("expand_value's o_latent", o_latent, activation_dtype());
  const std::int64_t rows = o_latent.size(0);
  const std::int64_t heads = shape.num_heads;
  const std::int64_t rank = shape.kv_lora_rank;
  expect_tensor("expand_value's o_latent", o_latent, activation_dtype(), Shape{rows, heads * rank});
  expect_tensor("expand_value's out", out, activation_dtype(),
                Shape{rows, heads * shape.v_head_dim});
  check(rank > 0, "expand_value from latents of {} values", rank);
  if (rows == 0 || heads == 0 || shape.v_head_dim == 0) {
    return;
  }
  head_products(kv_b, shape.qk_nope_head_dim * rank,
                {.rows = rows,
                 .out = shape.v_head_dim,
                 .in = rank,
                 .batch = heads,
                 .dtype = activation_dtype(),
                 .y_dtype = activation_dtype(),
                 .w_stride = rank,
                 .w_batch_stride = (shape.qk_nope_head_dim + shape.v_head_dim) * rank,
                 .x = o_latent.raw(),
                 .x_stride = o_latent.row_stride(),
                 .x_batch_stride = rank,
                 .y = out.raw(),
                 .y_stride = out.row_stride(),
                 .y_batch_stride = shape.v_head_dim});
}

}  // namespace kdtree
