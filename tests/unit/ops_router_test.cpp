#include <optional>

#include "tests/unit/op_test.h"

namespace kdtree::ops_test {
namespace {

struct Routing {
  RouterScoring scoring = RouterScoring::kSigmoid;
  RouterMethod method = RouterMethod::kNoAuxTc;
  std::int64_t n_group = 1;
  std::int64_t topk_group = 1;
  bool norm_topk_prob = true;
  bool scale_always = true;
  float routed_scaling_factor = 2.5F;
};

struct Input {
  std::int64_t num_experts = 0;
  std::vector<float> logits;  // [rows, num_experts]
  std::vector<float> bias;    // [num_experts], or none

  std::int64_t rows() const { return static_cast<std::int64_t>(logits.size()) / num_experts; }
};

struct Choice {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

// [rows, 2 * k]: a row's ids, then its weights.
std::vector<float> interleaved(const Choice& choice, std::int64_t k) {
  std::vector<float> both;
  for (std::int64_t r = 0; r < static_cast<std::int64_t>(choice.ids.size()) / k; ++r) {
    const auto ids = row_of(choice.ids, r, k);
    const auto weights = row_of(choice.weights, r, k);
    both.insert(both.end(), ids.begin(), ids.end());
    both.insert(both.end(), weights.begin(), weights.end());
  }
  return both;
}

class RouterTest : public OpTest {
 protected:
  static Choice run(Backend& other, const Routing& routing, std::int64_t k, const Input& given) {
    const std::int64_t rows = given.rows();
    const std::int64_t num_experts = given.num_experts;
    auto logit =
        make_floats(other, DType::kFloat32, {rows, num_experts}, given.logits, num_experts + 3);
    auto correction =
        make_tensor(other, {static_cast<std::int64_t>(given.bias.size())}, given.bias);
    GuardedTensor ids(other, DType::kInt32, {rows, k});
    GuardedTensor weights(other, DType::kFloat32, {rows, k});
    other.router({.logits = logit.view(),
                  .correction_bias = given.bias.empty() ? ConstTensorView() : correction.view(),
                  .scoring = routing.scoring,
                  .method = routing.method,
                  .n_group = routing.n_group,
                  .topk_group = routing.topk_group,
                  .norm_topk_prob = routing.norm_topk_prob,
                  .scale_always = routing.scale_always,
                  .routed_scaling_factor = routing.routed_scaling_factor,
                  .expert_ids = ids.view(),
                  .expert_weights = weights.view()});
    return {ids.download<std::int32_t>(), weights.download<float>()};
  }
};
KDTREE_TEST_ALL_BACKENDS(RouterTest);

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<double> score(const Routing& routing, const std::vector<float>& logits) {
  std::vector<double> scores(logits.begin(), logits.end());
  double total = 0;
  for (double& value : scores) {
    value =
        routing.scoring == RouterScoring::kSigmoid ? 1 / (1 + std::exp(-value)) : std::exp(value);
    total += value;
  }
  for (double& value : scores) {
    value /= routing.scoring == RouterScoring::kSigmoid ? 1 : total;
  }
  return scores;
}

// Places of the best `count` values, best first, equal ones by place. `margin` shrinks to the
// smallest distance between one that was taken and one that was not, and between neighbours of the
// order.
std::vector<std::int32_t> best_places(const std::vector<double>& values, std::int64_t count,
                                      double& margin) {
  std::vector<std::int32_t> places(values.size());
  std::iota(places.begin(), places.end(), 0);
  std::stable_sort(places.begin(), places.end(), [&](std::int32_t a, std::int32_t b) {
    return values[static_cast<std::size_t>(a)] > values[static_cast<std::size_t>(b)];
  });
  for (std::size_t i = 0; i < static_cast<std::size_t>(count) && i + 1 < places.size(); ++i) {
    const double next = values[static_cast<std::size_t>(places[i + 1])];
    if (next > -kInfinity) {
      margin = std::min(margin, values[static_cast<std::size_t>(places[i])] - next);
    }
  }
  places.resize(static_cast<std::size_t>(count));
  return places;
}

struct Reference {
  std::vector<std::int32_t> ids;
  std::vector<double> weights;
  double margin = kInfinity;  // how close the choice was to another one
};

// One row, written from the definition.
Reference route(const Routing& routing, std::int64_t k, const std::vector<float>& logits,
                const std::vector<float>& bias) {
  const auto scores = score(routing, logits);
  auto choice = scores;
  if (routing.method == RouterMethod::kNoAuxTc && !bias.empty()) {
    for (std::size_t e = 0; e < choice.size(); ++e) {
      choice[e] += bias[e];
    }
  }
  Reference reference;
  if (routing.method != RouterMethod::kGreedy && routing.n_group > 1) {
    const auto size = static_cast<std::ptrdiff_t>(choice.size()) / routing.n_group;
    std::vector<double> groups;
    for (std::int64_t g = 0; g < routing.n_group; ++g) {
      std::vector<double> members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
      std::sort(members.rbegin(), members.rend());
      const bool two = routing.method == RouterMethod::kNoAuxTc && size > 1;
      groups.push_back(members[0] + (two ? members[1] : 0));
    }
    const auto kept = best_places(groups, routing.topk_group, reference.margin);
    for (std::int64_t g = 0; g < routing.n_group; ++g) {
      if (std::find(kept.begin(), kept.end(), g) == kept.end()) {
        std::fill_n(choice.begin() + g * size, size, -kInfinity);
      }
    }
  }
  reference.ids = best_places(choice, k, reference.margin);
  double total = 0;
  for (const std::int32_t id : reference.ids) {
    total += scores[static_cast<std::size_t>(id)];
  }
  for (const std::int32_t id : reference.ids) {
    double weight = scores[static_cast<std::size_t>(id)];
    weight = routing.norm_topk_prob ? weight / (total + 1e-20) : weight;
    weight *= routing.scale_always || !routing.norm_topk_prob ? routing.routed_scaling_factor : 1;
    reference.weights.push_back(weight);
  }
  return reference;
}

// Compares all rows whose choice float32 cannot see otherwise: scores and biased scores below 4 are
// off by less than 1e-6. Weights: a sigmoid has 5 roundings. A softmax score has the argument's
// (below 8 u for logits within +-4), exp's 2 u, n of the sum and one of the quotient. Then come a
// sum of k, a quotient and a product.
void expect_routing(const Routing& routing, std::int64_t k, const Input& given, const Choice& got) {
  const double score_roundings = routing.scoring == RouterScoring::kSigmoid
                                     ? 5
                                     : 2 * (8 + 2) + static_cast<double>(given.num_experts) + 1;
  std::int64_t num_close = 0;
  for (std::int64_t r = 0; r < given.rows(); ++r) {
    const Reference want =
        route(routing, k, row_of(given.logits, r, given.num_experts), given.bias);
    if (want.margin < 1e-6) {
      ++num_close;
      continue;
    }
    EXPECT_EQ(row_of(got.ids, r, k), want.ids) << "row " << r;
    Expected weights;
    for (const double weight : want.weights) {
      weights.add(weight,
                  1.01 * (2 * score_roundings + static_cast<double>(k) + 3) * kRound * weight);
    }
    expect_within(row_of(got.weights, r, k), weights, "expert weights");
  }
  EXPECT_LE(num_close, 1 + given.rows() / 10) << "the test compares too little";
}

TEST_P(RouterTest, MatchesTheDefinition) {
  Random random(1);
  const std::vector<Routing> routings = {
      {},
      {.norm_topk_prob = false},
      {.n_group = 4, .topk_group = 2},
      {.n_group = 12, .topk_group = 7},  // two experts a group
      {.n_group = 24, .topk_group = 9},  // one expert a group
      {.scoring = RouterScoring::kSoftmax, .method = RouterMethod::kGreedy, .scale_always = false},
      {.scoring = RouterScoring::kSoftmax,
       .method = RouterMethod::kGreedy,
       .norm_topk_prob = false,
       .scale_always = false},
      {.scoring = RouterScoring::kSoftmax,
       .method = RouterMethod::kGroupLimitedGreedy,
       .n_group = 8,
       .topk_group = 3,
       .norm_topk_prob = false,
       .scale_always = false,
       .routed_scaling_factor = 16},
      {.scoring = RouterScoring::kSigmoid,
       .method = RouterMethod::kGreedy,
       .n_group = 4,
       .topk_group = 1},
  };
  constexpr std::int64_t kExperts = 24;
  for (const Routing& routing : routings) {
    for (const std::int64_t k : {1, 2, 6}) {
      for (const std::int64_t rows : {0, 1, 3, 50}) {
        const Input given = {kExperts, random.floats(rows * kExperts, -4, 4),
                             random.floats(kExperts, -1, 1)};
        expect_routing(routing, k, given, run(backend(), routing, k, given));
      }
    }
  }
}

TEST_P(RouterTest, ManyExperts) {
  Random random(2);
  for (const std::int64_t num_experts : {1, 3, 256, 384}) {
    const std::int64_t k = std::min<std::int64_t>(8, num_experts);
    Input given = {num_experts, random.floats(20 * num_experts, -4, 4),
                   random.floats(num_experts, -0.2, 0.2)};
    expect_routing({}, k, given, run(backend(), {}, k, given));
    given.bias.clear();
    expect_routing({}, k, given, run(backend(), {}, k, given));
  }
}

// The correction bias chooses and does not weigh.
TEST_P(RouterTest, WeightsAreUnbiased) {
  const Routing routing = {.norm_topk_prob = false, .routed_scaling_factor = 1};
  const Choice got = run(backend(), routing, 2, {4, {0, 0, 0, 4}, {0, 3, 2, 0}});
  EXPECT_EQ(got.ids, (std::vector<std::int32_t>{1, 2}));
  EXPECT_EQ(got.weights, (std::vector<float>{0.5F, 0.5F}));
}

TEST_P(RouterTest, TiesGoToTheLowestId) {
  const Choice equal = run(backend(), {}, 3, {8, std::vector<float>(8, 1.0F), {}});
  EXPECT_EQ(equal.ids, (std::vector<std::int32_t>{0, 1, 2}));
  // Equal groups as well.
  const Choice groups =
      run(backend(), {.n_group = 4, .topk_group = 2}, 4, {8, std::vector<float>(8, 1.0F), {}});
  EXPECT_EQ(groups.ids, (std::vector<std::int32_t>{0, 1, 2, 3}));
}

// Negative biased scores: a group that is masked with 0 instead of -infinity would win.
TEST_P(RouterTest, MaskedGroupsLoseAgainstNegativeScores) {
  const std::vector<float> bias = {-3, -3, -3, -3, -3.5F, -3.5F, -3.5F, -3.5F};
  const Choice got =
      run(backend(), {.n_group = 2, .topk_group = 1}, 3, {8, std::vector<float>(8, 0.0F), bias});
  EXPECT_EQ(got.ids, (std::vector<std::int32_t>{0, 1, 2}));
}

// More experts wanted than the allowed groups hold: the others follow, by id, with their own
// scores.
TEST_P(RouterTest, MoreThanTheAllowedGroupsHold) {
  Random random(3);
  const Routing routing = {
      .n_group = 2, .topk_group = 1, .norm_topk_prob = false, .routed_scaling_factor = 1};
  const std::vector<float> logits = {1, 2, 3, 0, 4, 5, 4.5F, 6};
  const Choice got = run(backend(), routing, 8, {8, logits, {}});
  EXPECT_EQ(got.ids, (std::vector<std::int32_t>{7, 5, 6, 4, 0, 1, 2, 3}));
  for (std::size_t i = 0; i < 8; ++i) {
    const double logit = logits[static_cast<std::size_t>(got.ids[i])];
    EXPECT_NEAR(got.weights[i], 1 / (1 + std::exp(-logit)), 5 * kRound);
  }
}

TEST_P(RouterTest, NanLogitsChooseExistingExpertsOnce) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Routing& routing : {Routing{}, Routing{.n_group = 2, .topk_group = 1}}) {
    for (const auto& logits : {std::vector<float>(4, nan), std::vector<float>{nan, 1, nan, 2}}) {
      const Choice got = run(backend(), routing, 3, {4, logits, {}});
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_GE(got.ids[i], 0);
        EXPECT_LT(got.ids[i], 4);
        EXPECT_EQ(std::count(got.ids.begin(), got.ids.end(), got.ids[i]), 1);
      }
    }
  }
  EXPECT_EQ(run(backend(), {}, 2, {4, {nan, 1, nan, 2}, {}}).ids,
            (std::vector<std::int32_t>{3, 1}));
}

TEST_P(RouterTest, RowsAreIndependent) {
  Random random(4);
  constexpr std::int64_t kExperts = 384;
  constexpr std::int64_t kRows = 70;
  const auto logits = random.floats(kRows * kExperts, -4, 4);
  const auto bias = random.floats(kExperts, -0.2, 0.2);
  for (const Routing& routing :
       {Routing{}, Routing{.n_group = 8, .topk_group = 4},
        Routing{.scoring = RouterScoring::kSoftmax, .method = RouterMethod::kGreedy}}) {
    expect_row_independence<float>(
        kRows, [&](Backend& other, const std::vector<std::int64_t>& rows) {
          return interleaved(
              run(other, routing, 8, {kExperts, choose_rows(logits, rows, kExperts), bias}), 8);
        });
  }
}

TEST_P(RouterTest, RowsOfAnyCall) {
  Random random(5);
  constexpr std::int64_t kExperts = 384;
  constexpr std::int64_t kChosen = 8;
  const auto logits = random.floats(kMostRows * kExperts, -4, 4);
  const auto bias = random.floats(kExperts, -0.2, 0.2);
  for (const Routing& routing :
       {Routing{}, Routing{.n_group = 8, .topk_group = 4},
        Routing{.scoring = RouterScoring::kSoftmax, .method = RouterMethod::kGreedy}}) {
    const auto both =
        expect_rows_of_any_call<float>([&](Backend& other, const std::vector<std::int64_t>& rows) {
          return interleaved(
              run(other, routing, kChosen, {kExperts, choose_rows(logits, rows, kExperts), bias}),
              kChosen);
        });
    Choice got;
    for (std::int64_t r = 0; r < kMostRows; ++r) {
      const auto row = row_of(both, r, 2 * kChosen);
      got.ids.insert(got.ids.end(), row.begin(), row.begin() + kChosen);
      got.weights.insert(got.weights.end(), row.begin() + kChosen, row.end());
    }
    expect_routing(routing, kChosen, {kExperts, logits, bias}, got);
  }
}

TEST_P(RouterTest, MalformedShapesThrow) {
  const std::vector<float> logits(8, 0.0F);
  EXPECT_THROW(run(backend(), {.n_group = 3, .topk_group = 1}, 2, {8, logits, {}}), Error);
  EXPECT_THROW(run(backend(), {.n_group = 2, .topk_group = 3}, 2, {8, logits, {}}), Error);
  EXPECT_THROW(run(backend(), {}, 9, {8, logits, {}}), Error);
  EXPECT_THROW(run(backend(), {}, 2, {8, logits, std::vector<float>(7)}), Error);
}

}  // namespace
}  // namespace kdtree::ops_test
