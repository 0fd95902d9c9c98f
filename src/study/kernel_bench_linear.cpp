// Products with the matrices of a layer and of the vocabulary, in bf16.
#include <cmath>
#include <memory>
#include <vector>

#include "study/bench_data.h"
#include "study/kernel_bench_cases.h"

namespace kdtree {

namespace {

constexpr std::int64_t kSampledLinearRows = 4;
constexpr std::int64_t kSampledLinearColumns = 32;

struct MatrixShape {
  std::string name;
  std::int64_t out = 0;
  std::int64_t in = 0;
  bool float_output = false;  // logits
};

// Every distinct matrix of the model outside of its routed experts, as this rank holds it.
std::vector<MatrixShape> matrix_shapes(const BenchContext& context) {
  const ModelConfig& config = context.config;
  const MlaShape mla = context.mla_shape();
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t query_width = mla.num_heads * mla.qk_head_dim();
  std::vector<MatrixShape> shapes;
  if (config.q_lora_rank > 0) {
    shapes.push_back({"q_a_proj", config.q_lora_rank, hidden});
    shapes.push_back({"q_b_proj", query_width, config.q_lora_rank});
  } else {
    shapes.push_back({"q_proj", query_width, hidden});
  }
  shapes.push_back({"kv_a_proj_with_mqa", mla.latent_dim(), hidden});
  shapes.push_back({"o_proj", hidden, mla.num_heads * mla.v_head_dim});
  if (!config.is_moe_layer(0)) {
    const std::int64_t width = context.partition.intermediate.size();
    shapes.push_back({"dense gate_proj, up_proj", width, hidden});
    shapes.push_back({"dense down_proj", hidden, width});
  }
  if (config.n_shared_experts > 0) {
    const std::int64_t width = context.partition.shared_intermediate.size();
    shapes.push_back({"shared gate_proj, up_proj", width, hidden});
    shapes.push_back({"shared down_proj", hidden, width});
  }
  if (config.n_routed_experts > 0) {
    shapes.push_back({"router gate", config.n_routed_experts, hidden, true});
  }
  shapes.push_back({"lm_head", context.partition.vocabulary.size(), hidden, true});
  return shapes;
}

// Bound: in + 1 roundings of the sum and what storing y adds.
ResultCheck check_linear(const BenchMatrix& matrix, const std::vector<float>& x,
                         const std::vector<float>& y, DType y_dtype, std::int64_t rows) {
  const std::int64_t in = matrix.view().in_features;
  const std::int64_t out = matrix.view().out_features;
  ResultCheck check;
  for (const std::int64_t column : sample_places(out, kSampledLinearColumns)) {
    const std::vector<double> weights = matrix.row(column);
    for (const std::int64_t row : sample_places(rows, kSampledLinearRows)) {
      std::vector<BoundedValue> values;
      for (std::int64_t i = 0; i < in; ++i) {
        values.push_back({x[static_cast<std::size_t>(row * in + i)], 0});
      }
      const BoundedValue want = bounded_dot(weights, values);
      check.within(y[static_cast<std::size_t>(row * out + column)], want.value,
                   want.error + store_error(y_dtype, want.value), "y", row * out + column);
    }
  }
  return check;
}

void bench_matrix(const BenchContext& context, const MatrixShape& shape) {
  Backend& backend = context.backend;
  const std::int64_t matrix_bytes = shape.out * shape.in * dtype_bytes(DType::kBFloat16);
  if (matrix_bytes == 0) {
    return;  // an empty share of a rank
  }
  const std::uint64_t seed = context.seed("linear " + shape.name);
  std::vector<std::unique_ptr<BenchMatrix>> copies;
  for (std::int64_t i = 0; i < context.num_copies("linear", matrix_bytes); ++i) {
    copies.push_back(std::make_unique<BenchMatrix>(backend, shape.out, shape.in, seed + i));
  }
  const DType y_dtype = shape.float_output ? DType::kFloat32 : context.activation();
  const std::int64_t most = context.max_rows();
  const std::vector<float> values =
      BenchRandom(context.seed("linear x")).floats(most * shape.in, -1, 1, context.activation());
  const DeviceTensor all_x =
      upload_floats(backend, context.activation(), Shape{most, shape.in}, values);
  const DeviceTensor all_y(backend, y_dtype, Shape{most, shape.out});
  for (const std::int64_t rows : context.options.rows) {
    const ConstTensorView x = all_x.rows(rows);
    const TensorView y = all_y.rows(rows);
    context.measure(
        {.kernel = "linear",
         .shape = {{"matrix", shape.name}, {"out_features", shape.out}, {"in_features", shape.in}},
         .rows = rows,
         .weight_bytes = matrix_bytes,
         .activation_bytes = x.bytes() + y.bytes(),
         .flops = 2.0 * static_cast<double>(rows * shape.out) * static_cast<double>(shape.in),
         .num_copies = static_cast<std::int64_t>(copies.size()),
         .run =
             [&](std::int64_t copy) {
               backend.linear(copies[static_cast<std::size_t>(copy)]->view(), x, y);
             },
         .check =
             [&] {
               return check_linear(*copies[0], values, download_rows(backend, y, 0, rows), y_dtype,
                                   rows);
             }});
  }
}

}  // namespace

void bench_linears(const BenchContext& context) {
  for (const MatrixShape& shape : matrix_shapes(context)) {
    bench_matrix(context, shape);
  }
}

}  // namespace kdtree
