// Ops on whole rows between the products: norms, the gated activation, the router.
//
// Their inputs come from the op before and lie in the cache: one copy of each.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "study/bench_data.h"
#include "study/kernel_bench_cases.h"

namespace kdtree {

namespace {

constexpr std::int64_t kSampledRows = 4;

// y = x / sqrt(mean(x^2) + eps) * weight. The n squares and their sum have at most n roundings, the
// quotient and the sum with eps one each, which the root halves; the root, the reciprocal and two
// products round four times.
struct NormRow {
  std::span<const float> x;
  std::span<const float> weight;
  float eps = 0;
  DType activation = DType::kFloat32;
};

void check_norm(const NormRow& row, std::span<const float> got, ResultCheck& check) {
  const auto& [x, weight, eps, activation] = row;
  const auto cols = static_cast<double>(weight.size());
  double sum = 0;
  for (std::size_t c = 0; c < weight.size(); ++c) {
    sum += static_cast<double>(x[c]) * x[c];
  }
  const double scale = 1 / std::sqrt(sum / cols + static_cast<double>(eps));
  const double relative = 1.01 * ((cols + 2) / 2 + 4) * kFloatRound;
  for (std::size_t c = 0; c < weight.size(); ++c) {
    const double want = x[c] * scale * weight[c];
    check.within(got[c], want, relative * std::abs(want) + store_error(activation, want), "y",
                 static_cast<std::int64_t>(c));
  }
}

float rounded(DType dtype, float value) {
  return dtype == DType::kBFloat16 ? BFloat16::from_float(value).to_float() : value;
}

void bench_norms(const BenchContext& context) {
  Backend& backend = context.backend;
  const DType activation = context.activation();
  const std::int64_t cols = context.config.hidden_size;
  const auto eps = static_cast<float>(context.config.rms_norm_eps);
  BenchRandom random(context.seed("norms"));
  const std::vector<float> weights = random.floats(cols, 0.5, 1.5, DType::kFloat32);
  const DeviceTensor weight = upload_floats(backend, DType::kFloat32, Shape{cols}, weights);
  for (const std::int64_t rows : context.options.rows) {
    const Shape shape{rows, cols};
    const std::vector<float> values = random.floats(rows * cols, -2, 2, activation);
    const std::vector<float> deltas = random.floats(rows * cols, -1, 1, activation);
    const DeviceTensor x = upload_floats(backend, activation, shape, values);
    const DeviceTensor delta = upload_floats(backend, activation, shape, deltas);
    const DeviceTensor y(backend, activation, shape);
    const auto measure = [&](const char* kernel, bool adds) {
      if (!context.wants(kernel)) {
        return;
      }
      context.measure(
          {.kernel = kernel,
           .shape = {{"hidden_size", cols}},
           .rows = rows,
           // x and delta are read, x and y written.
           .activation_bytes = (adds ? 4 : 2) * x.bytes() + weight.bytes(),
           .run =
               [&, adds](std::int64_t) {
                 if (adds) {
                   backend.add_rms_norm(x.view(), delta.view(), weight.view(), eps, y.view());
                 } else {
                   backend.rms_norm(x.view(), weight.view(), eps, y.view());
                 }
               },
           .check =
               [&, adds] {
                 ResultCheck check;
                 for (const std::int64_t row : sample_places(rows, kSampledRows)) {
                   std::vector<float> input(static_cast<std::size_t>(cols));
                   const std::vector<float> kept = download_rows(backend, x.view(), row, 1);
                   for (std::size_t c = 0; c < input.size(); ++c) {
                     const std::size_t place = static_cast<std::size_t>(row * cols) + c;
                     // The sum is stored before it is normed.
                     input[c] =
                         adds ? rounded(activation, values[place] + deltas[place]) : values[place];
                     check.within(kept[c], input[c], 0, "x", static_cast<std::int64_t>(place));
                   }
                   check_norm({.x = input, .weight = weights, .eps = eps, .activation = activation},
                              download_rows(backend, y.view(), row, 1), check);
                 }
                 return check;
               }});
    };
    measure("rms_norm", false);
    measure("add_rms_norm", true);  // last: x grows with each call
  }
}

void bench_swiglu(const BenchContext& context, const char* mlp, std::int64_t cols) {
  Backend& backend = context.backend;
  const DType activation = context.activation();
  BenchRandom random(context.seed("swiglu"));
  for (const std::int64_t rows : context.options.rows) {
    const Shape shape{rows, cols};
    const std::vector<float> gates = random.floats(rows * cols, -8, 8, activation);
    const std::vector<float> ups = random.floats(rows * cols, -3, 3, activation);
    const DeviceTensor gate = upload_floats(backend, activation, shape, gates);
    const DeviceTensor up = upload_floats(backend, activation, shape, ups);
    const DeviceTensor y(backend, activation, shape);
    context.measure({.kernel = "swiglu",
                     .shape = {{"mlp", mlp}, {"width", cols}},
                     .rows = rows,
                     .activation_bytes = 3 * y.bytes(),
                     .run = [&](std::int64_t) { backend.swiglu(gate.view(), up.view(), y.view()); },
                     .check =
                         [&] {
                           const std::vector<float> got = download_rows(backend, y.view(), 0, rows);
                           ResultCheck check;
                           for (std::size_t i = 0; i < got.size(); ++i) {
                             const BoundedValue want = bounded_swiglu({gates[i], 0}, {ups[i], 0});
                             check.within(got[i], want.value,
                                          want.error + store_error(activation, want.value), "y",
                                          static_cast<std::int64_t>(i));
                           }
                           return check;
                         }});
  }
}

// Places of the best `count` values, best first, equal ones by place. `margin` shrinks to the
// smallest distance of neighbours in that order, the first one left out included.
std::vector<std::int32_t> best_places(const std::vector<double>& values, std::int64_t count,
                                      double& margin) {
  std::vector<std::int32_t> places(values.size());
  std::iota(places.begin(), places.end(), 0);
  std::stable_sort(places.begin(), places.end(), [&](std::int32_t a, std::int32_t b) {
    return values[static_cast<std::size_t>(a)] > values[static_cast<std::size_t>(b)];
  });
  const auto taken = static_cast<std::size_t>(count);
  for (std::size_t i = 0; i < taken && i + 1 < places.size(); ++i) {
    const double next = values[static_cast<std::size_t>(places[i + 1])];
    if (std::isfinite(next)) {
      margin = std::min(margin, values[static_cast<std::size_t>(places[i])] - next);
    }
  }
  places.resize(taken);
  return places;
}

struct RouterRow {
  std::vector<std::int32_t> ids;
  std::vector<double> weights;
  double margin = std::numeric_limits<double>::infinity();
};

// The choice that RouterParams describes, for one row in double precision.
RouterRow route(const RouterParams& params, const std::vector<float>& logits,
                const std::vector<float>& bias, std::int64_t k) {
  const bool sigmoid = params.scoring == RouterScoring::kSigmoid;
  std::vector<double> scores(logits.begin(), logits.end());
  double total = 0;
  for (double& score : scores) {
    score = sigmoid ? 1 / (1 + std::exp(-score)) : std::exp(score);
    total += score;
  }
  std::vector<double> choice;
  for (std::size_t e = 0; e < scores.size(); ++e) {
    scores[e] /= sigmoid ? 1 : total;
    choice.push_back(scores[e] + (bias.empty() ? 0 : bias[e]));
  }
  RouterRow row;
  if (params.method != RouterMethod::kGreedy && params.n_group > 1) {
    const auto size = static_cast<std::ptrdiff_t>(choice.size()) / params.n_group;
    std::vector<double> groups;
    for (auto first = choice.begin(); first != choice.end(); first += size) {
      std::vector<double> members(first, first + size);
      std::sort(members.rbegin(), members.rend());
      const bool two = params.method == RouterMethod::kNoAuxTc && size > 1;
      groups.push_back(members[0] + (two ? members[1] : 0));
    }
    const auto kept = best_places(groups, params.topk_group, row.margin);
    for (std::int32_t g = 0; g < params.n_group; ++g) {
      if (std::find(kept.begin(), kept.end(), g) == kept.end()) {
        std::fill_n(choice.begin() + g * size, size, -std::numeric_limits<double>::infinity());
      }
    }
  }
  row.ids = best_places(choice, k, row.margin);
  double sum = 0;
  for (const std::int32_t id : row.ids) {
    sum += scores[static_cast<std::size_t>(id)];
  }
  for (const std::int32_t id : row.ids) {
    const double norm = params.norm_topk_prob ? sum + 1e-20 : 1;
    const bool scaled = params.scale_always || !params.norm_topk_prob;
    row.weights.push_back(scores[static_cast<std::size_t>(id)] / norm *
                          (scaled ? static_cast<double>(params.routed_scaling_factor) : 1.0));
  }
  return row;
}

struct RouterData {
  RouterParams params;
  std::vector<float> logits;  // [rows, n_routed_experts]
  std::vector<float> bias;    // [n_routed_experts], or none
  std::int64_t num_experts = 0;
  std::int64_t k = 0;
};

// Rows whose choice hangs on less than float32 can tell are left out: scores and biased scores
// below 4 are off by less than 1e-6. Weights: a sigmoid score has 5 roundings; a softmax score the
// argument's (8 u for logits within +-4) and exp's 2 u twice, n of its sum and the quotient's; then
// come a sum of k, a quotient and a product.
ResultCheck check_router(const RouterData& data, const std::vector<std::int32_t>& ids,
                         const std::vector<float>& weights, std::int64_t rows) {
  const double score_roundings = data.params.scoring == RouterScoring::kSigmoid
                                     ? 5
                                     : 2 * (8 + 2) + static_cast<double>(data.num_experts) + 1;
  const double relative =
      1.01 * (2 * score_roundings + static_cast<double>(data.k) + 3) * kFloatRound;
  ResultCheck check;
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto first = data.logits.begin() + r * data.num_experts;
    const RouterRow want = route(data.params, {first, first + data.num_experts}, data.bias, data.k);
    for (std::size_t i = 0; i < want.ids.size() && want.margin >= 1e-6; ++i) {
      const std::int64_t place = r * data.k + static_cast<std::int64_t>(i);
      check.equal(ids[static_cast<std::size_t>(place)], want.ids[i], "expert", place);
      check.within(weights[static_cast<std::size_t>(place)], want.weights[i],
                   relative * std::abs(want.weights[i]), "weight", place);
    }
  }
  return check;
}

RouterMethod router_method(const std::string& topk_method) {
  if (topk_method == "noaux_tc") {
    return RouterMethod::kNoAuxTc;
  }
  return topk_method == "greedy" ? RouterMethod::kGreedy : RouterMethod::kGroupLimitedGreedy;
}

RouterParams router_params(const ModelConfig& config) {
  RouterParams params;
  params.scoring =
      config.scoring_func == "softmax" ? RouterScoring::kSoftmax : RouterScoring::kSigmoid;
  params.method = router_method(config.topk_method);
  params.n_group = config.n_group;
  params.topk_group = config.topk_group;
  params.norm_topk_prob = config.norm_topk_prob;
  params.scale_always = config.routed_scaling_always;
  params.routed_scaling_factor = static_cast<float>(config.routed_scaling_factor);
  return params;
}

}  // namespace

void bench_rows(const BenchContext& context) {
  if (context.wants("rms_norm") || context.wants("add_rms_norm")) {
    bench_norms(context);
  }
  if (!context.wants("swiglu")) {
    return;
  }
  const TargetPartition& part = context.partition;
  if (!context.config.is_moe_layer(0) && part.intermediate.size() > 0) {
    bench_swiglu(context, "dense", part.intermediate.size());
  }
  if (context.config.n_shared_experts > 0 && part.shared_intermediate.size() > 0) {
    bench_swiglu(context, "shared", part.shared_intermediate.size());
  }
}

void bench_router(const BenchContext& context) {
  const ModelConfig& config = context.config;
  if (config.n_routed_experts == 0) {
    return;
  }
  Backend& backend = context.backend;
  const std::int64_t experts = config.n_routed_experts;
  const std::int64_t k = config.num_experts_per_tok;
  const bool biased = config.topk_method == "noaux_tc";
  BenchRandom random(context.seed("router"));
  RouterData data{.params = router_params(config),
                  .logits = {},
                  .bias = random.floats(biased ? experts : 0, -0.2, 0.2, DType::kFloat32),
                  .num_experts = experts,
                  .k = k};
  const DeviceTensor bias = upload_floats(
      backend, DType::kFloat32, Shape{static_cast<std::int64_t>(data.bias.size())}, data.bias);
  for (const std::int64_t rows : context.options.rows) {
    data.logits = random.floats(rows * experts, -4, 4, DType::kFloat32);
    const DeviceTensor logits =
        upload_floats(backend, DType::kFloat32, Shape{rows, experts}, data.logits);
    const DeviceTensor ids(backend, DType::kInt32, Shape{rows, k});
    const DeviceTensor weights(backend, DType::kFloat32, Shape{rows, k});
    RouterParams params = data.params;
    params.logits = logits.view();
    params.correction_bias = biased ? ConstTensorView(bias.view()) : ConstTensorView();
    params.expert_ids = ids.view();
    params.expert_weights = weights.view();
    context.measure(
        {.kernel = "router",
         .shape = {{"n_routed_experts", experts},
                   {"num_experts_per_tok", k},
                   {"n_group", config.n_group}},
         .rows = rows,
         .activation_bytes = logits.bytes() + bias.bytes() + ids.bytes() + weights.bytes(),
         .run = [&](std::int64_t) { backend.router(params); },
         .check =
             [&] {
               return check_router(data, download_indices(backend, ids.view()),
                                   download_rows(backend, weights.view(), 0, rows), rows);
             }});
  }
}

}  // namespace kdtree
