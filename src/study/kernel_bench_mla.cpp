// What surrounds the attention: products with kv_b head by head, rotation.
#include <cmath>
#include <memory>
#include <vector>

#include "model/rope.h"
#include "study/bench_data.h"
#include "study/kernel_bench_cases.h"

namespace kdtree {

namespace {

constexpr std::int64_t kSampledMlaRows = 4;
constexpr std::int64_t kSampledMlaHeads = 4;
constexpr std::int64_t kSampledMlaColumns = 8;
constexpr std::int64_t kMostPositions = 4096;
constexpr std::int64_t kWordBytes = 4;  // of an index and of a float32

nlohmann::ordered_json mla_json(const MlaShape& shape) {
  return {{"num_heads", shape.num_heads},
          {"qk_nope_head_dim", shape.qk_nope_head_dim},
          {"qk_rope_head_dim", shape.qk_rope_head_dim},
          {"v_head_dim", shape.v_head_dim},
          {"kv_lora_rank", shape.kv_lora_rank}};
}

// kv_b of several layers, and what both products read and write.
struct HeadProducts {
  MlaShape shape;
  std::vector<std::unique_ptr<BenchMatrix>> kv_b;  // [heads * (nope + v), kv_lora_rank]
  std::vector<float> q;                            // [rows, heads * qk_head_dim]
  std::vector<float> o_latent;                     // [rows, heads * kv_lora_rank]
  DeviceTensor device_q;
  DeviceTensor device_o_latent;

  std::int64_t first_row_of(std::int64_t head) const {
    return head * (shape.qk_nope_head_dim + shape.v_head_dim);
  }
};

// query[r, h, c] = sum_n q[r, h, n] W_UK[h][n, c], then the rotated part as it is.
ResultCheck check_absorb(const HeadProducts& data, const std::vector<float>& query,
                         std::int64_t rows, DType activation) {
  const MlaShape& shape = data.shape;
  ResultCheck check;
  for (const std::int64_t head : sample_places(shape.num_heads, kSampledMlaHeads)) {
    std::vector<std::vector<double>> weights;
    for (std::int64_t n = 0; n < shape.qk_nope_head_dim; ++n) {
      weights.push_back(data.kv_b[0]->row(data.first_row_of(head) + n));
    }
    for (const std::int64_t row : sample_places(rows, kSampledMlaRows)) {
      const std::int64_t from = (row * shape.num_heads + head) * shape.qk_head_dim();
      const std::int64_t to = (row * shape.num_heads + head) * shape.latent_dim();
      for (const std::int64_t c : sample_places(shape.kv_lora_rank, kSampledMlaColumns)) {
        double sum = 0;
        double magnitude = 0;
        for (std::int64_t n = 0; n < shape.qk_nope_head_dim; ++n) {
          const double product = data.q[static_cast<std::size_t>(from + n)] *
                                 weights[static_cast<std::size_t>(n)][static_cast<std::size_t>(c)];
          sum += product;
          magnitude += std::abs(product);
        }
        check.within(query[static_cast<std::size_t>(to + c)], sum,
                     1.01 * static_cast<double>(shape.qk_nope_head_dim) * kFloatRound * magnitude +
                         store_error(activation, sum),
                     "query", to + c);
      }
      for (std::int64_t c = 0; c < shape.qk_rope_head_dim; ++c) {
        const std::int64_t place = to + shape.kv_lora_rank + c;
        check.within(query[static_cast<std::size_t>(place)],
                     data.q[static_cast<std::size_t>(from + shape.qk_nope_head_dim + c)], 0,
                     "query", place);
      }
    }
  }
  return check;
}

// out[r, h, v] = W_UV[h][v] . o_latent[r, h].
ResultCheck check_expand(const HeadProducts& data, const std::vector<float>& out, std::int64_t rows,
                         DType activation) {
  const MlaShape& shape = data.shape;
  ResultCheck check;
  for (const std::int64_t head : sample_places(shape.num_heads, kSampledMlaHeads)) {
    for (const std::int64_t v : sample_places(shape.v_head_dim, kSampledMlaColumns)) {
      const std::vector<double> weights =
          data.kv_b[0]->row(data.first_row_of(head) + shape.qk_nope_head_dim + v);
      for (const std::int64_t row : sample_places(rows, kSampledMlaRows)) {
        const std::int64_t from = (row * shape.num_heads + head) * shape.kv_lora_rank;
        std::vector<BoundedValue> latent;
        for (std::int64_t c = 0; c < shape.kv_lora_rank; ++c) {
          latent.push_back({data.o_latent[static_cast<std::size_t>(from + c)], 0});
        }
        const BoundedValue want = bounded_dot(weights, latent);
        const std::int64_t place = (row * shape.num_heads + head) * shape.v_head_dim + v;
        check.within(out[static_cast<std::size_t>(place)], want.value,
                     want.error + store_error(activation, want.value), "out", place);
      }
    }
  }
  return check;
}

// Both ops read one half of kv_b each.
void bench_head_products(const BenchContext& context) {
  Backend& backend = context.backend;
  const DType activation = context.activation();
  const std::int64_t most = context.max_rows();
  HeadProducts data;
  data.shape = context.mla_shape();
  const MlaShape& shape = data.shape;
  const std::int64_t kv_b_rows = shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim);
  const std::int64_t bytes = kv_b_rows * shape.kv_lora_rank * dtype_bytes(DType::kBFloat16);
  const std::uint64_t seed = context.seed("kv_b");
  // Half of a copy is read: twice as many fill the working set.
  for (std::int64_t i = 0; i < context.num_copies("absorb_query", (bytes + 1) / 2); ++i) {
    data.kv_b.push_back(
        std::make_unique<BenchMatrix>(backend, kv_b_rows, shape.kv_lora_rank, seed + i));
  }
  BenchRandom random(context.seed("mla x"));
  const std::int64_t q_width = shape.num_heads * shape.qk_head_dim();
  const std::int64_t latent_width = shape.num_heads * shape.kv_lora_rank;
  data.q = random.floats(most * q_width, -1, 1, activation);
  data.o_latent = random.floats(most * latent_width, -1, 1, activation);
  data.device_q = upload_floats(backend, activation, Shape{most, q_width}, data.q);
  data.device_o_latent =
      upload_floats(backend, activation, Shape{most, latent_width}, data.o_latent);
  const DeviceTensor query(backend, activation, Shape{most, shape.num_heads * shape.latent_dim()});
  const DeviceTensor out(backend, activation, Shape{most, shape.num_heads * shape.v_head_dim});
  const auto measure = [&](const std::string& kernel, std::int64_t rows, std::int64_t head_width,
                           const std::function<void(const BenchMatrix&)>& run,
                           std::int64_t activation_bytes,
                           const std::function<ResultCheck()>& check) {
    if (!context.wants(kernel)) {
      return;
    }
    const std::int64_t weights = shape.num_heads * head_width * shape.kv_lora_rank;
    context.measure(
        {.kernel = kernel,
         .shape = mla_json(shape),
         .rows = rows,
         .weight_bytes = weights * dtype_bytes(DType::kBFloat16),
         .activation_bytes = activation_bytes,
         .flops = 2.0 * static_cast<double>(rows) * static_cast<double>(weights),
         .num_copies = static_cast<std::int64_t>(data.kv_b.size()),
         .run = [&](std::int64_t copy) { run(*data.kv_b[static_cast<std::size_t>(copy)]); },
         .check = check});
  };
  for (const std::int64_t rows : context.options.rows) {
    measure(
        "absorb_query", rows, shape.qk_nope_head_dim,
        [&](const BenchMatrix& kv_b) {
          backend.absorb_query(kv_b.view(), shape, data.device_q.rows(rows), query.rows(rows));
        },
        data.device_q.rows(rows).bytes() + query.rows(rows).bytes(),
        [&] {
          return check_absorb(data, download_rows(backend, query.view(), 0, rows), rows,
                              activation);
        });
    measure(
        "expand_value", rows, shape.v_head_dim,
        [&](const BenchMatrix& kv_b) {
          backend.expand_value(kv_b.view(), shape, data.device_o_latent.rows(rows), out.rows(rows));
        },
        data.device_o_latent.rows(rows).bytes() + out.rows(rows).bytes(),
        [&] {
          return check_expand(data, download_rows(backend, out.view(), 0, rows), rows, activation);
        });
  }
}

struct Rotation {
  MlaShape shape;
  std::vector<float> table;             // [positions, rope_dim]
  std::vector<std::int32_t> positions;  // [rows]
  std::vector<float> x;                 // [rows, heads * qk_head_dim] before the rotation
};

// Two products and their sum: two roundings on the way of each.
ResultCheck check_rope(const Rotation& data, const std::vector<float>& got, std::int64_t rows,
                       DType activation) {
  const MlaShape& shape = data.shape;
  const std::int64_t half = shape.qk_rope_head_dim / 2;
  ResultCheck check;
  for (const std::int64_t row : sample_places(rows, kSampledMlaRows)) {
    const std::int64_t position = data.positions[static_cast<std::size_t>(row)];
    const float* cos_sin = data.table.data() + position * shape.qk_rope_head_dim;
    for (const std::int64_t head : sample_places(shape.num_heads, kSampledMlaHeads)) {
      const std::int64_t first = (row * shape.num_heads + head) * shape.qk_head_dim();
      for (std::int64_t c = 0; c < shape.qk_nope_head_dim; ++c) {
        const auto place = static_cast<std::size_t>(first + c);
        check.within(got[place], data.x[place], 0, "x", first + c);
      }
      for (std::int64_t i = 0; i < half; ++i) {
        const std::int64_t place = first + shape.qk_nope_head_dim + 2 * i;
        const double a = data.x[static_cast<std::size_t>(place)];
        const double b = data.x[static_cast<std::size_t>(place) + 1];
        const double c = cos_sin[i];
        const double s = cos_sin[half + i];
        const auto compare = [&](std::int64_t at, double want, double magnitude) {
          check.within(got[static_cast<std::size_t>(at)], want,
                       2.01 * kFloatRound * magnitude + store_error(activation, want), "x", at);
        };
        compare(place, a * c - b * s, std::abs(a * c) + std::abs(b * s));
        compare(place + 1, a * s + b * c, std::abs(a * s) + std::abs(b * c));
      }
    }
  }
  return check;
}

// The queries of all heads, rotated in place again and again: their size stays.
void bench_rope(const BenchContext& context) {
  Backend& backend = context.backend;
  const DType activation = context.activation();
  const MlaShape shape = context.mla_shape();
  const std::int64_t width = shape.num_heads * shape.qk_head_dim();
  BenchRandom random(context.seed("rope"));
  Rotation data{.shape = shape,
                .table = rope_table(context.config.rope, shape.qk_rope_head_dim, kMostPositions),
                .positions = {},
                .x = {}};
  const DeviceTensor table = upload_floats(
      backend, DType::kFloat32, Shape{kMostPositions, shape.qk_rope_head_dim}, data.table);
  for (const std::int64_t rows : context.options.rows) {
    data.positions.clear();
    for (std::int64_t r = 0; r < rows; ++r) {
      data.positions.push_back(static_cast<std::int32_t>(random.below(kMostPositions)));
    }
    data.x = random.floats(rows * width, -1, 1, activation);
    const DeviceTensor positions = upload_indices(backend, Shape{rows}, data.positions);
    const DeviceTensor x = upload_floats(backend, activation, Shape{rows, width}, data.x);
    const std::int64_t rotated = rows * shape.num_heads * shape.qk_rope_head_dim;
    context.measure({.kernel = "rope",
                     .shape = {{"num_heads", shape.num_heads},
                               {"head_stride", shape.qk_head_dim()},
                               {"rope_dim", shape.qk_rope_head_dim}},
                     .rows = rows,
                     .activation_bytes = 2 * rotated * context.activation_size() +
                                         rows * (1 + shape.qk_rope_head_dim) * kWordBytes,
                     .run =
                         [&](std::int64_t) {
                           backend.rope({.x = x.view(),
                                         .num_heads = shape.num_heads,
                                         .head_stride = shape.qk_head_dim(),
                                         .offset = shape.qk_nope_head_dim,
                                         .positions = positions.view(),
                                         .cos_sin = table.view(),
                                         .layout = RopeLayout::kInterleaved});
                         },
                     .check =
                         [&] {
                           return check_rope(data, download_rows(backend, x.view(), 0, rows), rows,
                                             activation);
                         }});
  }
}

}  // namespace

void bench_mla(const BenchContext& context) {
  if (context.wants("absorb_query") || context.wants("expand_value")) {
    bench_head_products(context);
  }
  if (context.wants("rope")) {
    bench_rope(context);
  }
}

}  // namespace kdtree
