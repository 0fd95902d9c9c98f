#include "tests/unit/op_experts.h"

namespace kdtree::ops_test {
namespace {

class ExpertsTest : public ExpertsOpTest {};
KDTREE_TEST_ALL_BACKENDS(ExpertsTest);

TEST_P(ExpertsTest, MatchesDoublePrecision) {
  Random random(1);
  const auto store = [this](double value) { return store_error(value); };
  for (const WeightKind& kind : all_weight_kinds()) {
    const std::int64_t unit = std::max<std::int64_t>(1, kind.group_size);
    const std::int64_t hidden = kind.group_size == 0 ? 21 : (unit < 32 ? 3 * unit : unit);
    const std::int64_t intermediate = kind.group_size == 0 ? 11 : unit;
    const Experts experts(backend(), kind, {3, hidden, intermediate}, 2);
    for (const std::int64_t rows : {0, 1, 2, 13}) {
      for (const std::int64_t k : {1, 4}) {
        const Routed routed = random_routing(random, rows, k, 6, experts);
        expect_within(run(backend(), experts, routed), reference(experts, routed, store),
                      kind.name());
      }
    }
  }
}

TEST_P(ExpertsTest, RowsWithoutExpertsHereAreZero) {
  Random random(3);
  const Experts experts(backend(), {WeightFormat::kFloat32}, {2, 8, 4}, 4);
  const Routed routed = {.k = 2,
                         .x = activations(random, 24),
                         .ids = {-1, -1, 2, -1, 0, 3},
                         .weights = {1, 1, 1, 1, 1, 1},
                         .slot_of = {0, 1, -1, -1}};
  const auto got = run(backend(), experts, routed);
  EXPECT_EQ(row_of(got, 0, 8), std::vector<float>(8, 0.0F));
  EXPECT_EQ(row_of(got, 1, 8), std::vector<float>(8, 0.0F));
  EXPECT_NE(row_of(got, 2, 8), std::vector<float>(8, 0.0F));
}

// The sum over a row's experts runs in order of k, whatever their slots: here 1e8 d - 1e8 d + d,
// which is d in this order and rounded away in others.
TEST_P(ExpertsTest, SumRunsInOrderOfK) {
  Random random(13);
  const Experts experts(backend(), {WeightFormat::kFloat32}, {1, 8, 4}, 14);
  const WeightView gates[] = {experts.gate[0].view(), experts.gate[0].view(),
                              experts.gate[0].view()};
  const WeightView ups[] = {experts.up[0].view(), experts.up[0].view(), experts.up[0].view()};
  const WeightView downs[] = {experts.down[0].view(), experts.down[0].view(),
                              experts.down[0].view()};
  const auto set = backend().make_expert_set({gates, ups, downs});
  auto x = input({1, 8}, activations(random, 8));
  auto slot_of = make_indices(backend(), {2, 0, 1});
  const std::int64_t bytes = backend().experts_workspace_bytes(1, 3, 8, 4);
  const auto run_weighted = [&](const std::vector<std::int32_t>& ids,
                                const std::vector<float>& factors) {
    auto expert_ids = make_tensor(backend(), {1, 3}, ids);
    auto weights = make_tensor(backend(), {1, 3}, factors);
    auto out = output({1, 8});
    GuardedTensor workspace(backend(), DType::kUInt8, {bytes});
    backend().experts({.experts = set.get(),
                       .x = x.view(),
                       .expert_ids = expert_ids.view(),
                       .expert_weights = weights.view(),
                       .logical_to_slot = slot_of.view(),
                       .output = out.view(),
                       .workspace = workspace.view()});
    return read_floats(out);
  };
  const auto once = run_weighted({-1, -1, 0}, {0, 0, 1});
  EXPECT_NE(once, std::vector<float>(8, 0.0F));
  for (const auto& ids : {std::vector<std::int32_t>{0, 1, 2}, {2, 1, 0}, {1, 0, 2}, {1, 2, 0}}) {
    EXPECT_EQ(run_weighted(ids, {1e8F, -1e8F, 1}), once);
  }
}

// A rank with an empty share of every expert, and one without experts.
TEST_P(ExpertsTest, EmptyExperts) {
  Random random(5);
  const Routed routed = {
      .k = 1, .x = activations(random, 16), .ids = {0, 1}, .weights = {1, 1}, .slot_of = {0, 1}};
  const Experts no_width(backend(), {WeightFormat::kFloat32}, {2, 8, 0}, 6);
  EXPECT_EQ(run(backend(), no_width, routed), std::vector<float>(16, 0.0F));
  const Experts none(backend(), {WeightFormat::kFloat32}, {0, 8, 4}, 6);
  Routed elsewhere = routed;
  elsewhere.slot_of = {-1, -1};
  EXPECT_EQ(run(backend(), none, elsewhere), std::vector<float>(16, 0.0F));
}

// All rows at one expert: the longest group there is.
TEST_P(ExpertsTest, OneExpertForAllRows) {
  Random random(7);
  const Experts experts(backend(), {WeightFormat::kInt4Group, 32, DType::kFloat32}, {2, 64, 32}, 8);
  const Routed routed = {.k = 1,
                         .x = activations(random, 4480),
                         .ids = std::vector<std::int32_t>(70, 1),
                         .weights = random.floats(70, 0, 1),
                         .slot_of = {-1, 1}};
  expect_within(run(backend(), experts, routed),
                reference(experts, routed, [this](double value) { return store_error(value); }),
                "one expert");
}

// Shapes that a backend may keep in an order of its own (backend.prepare), with few and many rows
// an expert.
TEST_P(ExpertsTest, WideInt4MatchesDoublePrecision) {
  struct Case {
    std::int64_t hidden;
    std::int64_t intermediate;
    std::vector<std::int64_t> rows;
  };
  const Case cases[] = {{256, 128, {1, 7, 8, 9, 64}},
                        {512, 256, {17}},
                        {2048, 128, {9}},
                        {7168, 128, {1, 9}},
                        {128, 64, {5}}};
  Random random(21);
  const auto store = [this](double value) { return store_error(value); };
  for (const Case& shape : cases) {
    const Experts experts(backend(), {WeightFormat::kInt4Group, 32, DType::kBFloat16},
                          {3, shape.hidden, shape.intermediate}, 22);
    for (const std::int64_t rows : shape.rows) {
      Routed routed = random_routing(random, rows, 2, 4, experts);
      const std::string name = "hidden " + std::to_string(shape.hidden) + ", intermediate " +
                               std::to_string(shape.intermediate) + ", rows " +
                               std::to_string(rows);
      expect_within(run(backend(), experts, routed), reference(experts, routed, store), name);
      // All rows at the last expert.
      for (std::size_t i = 0; i < routed.ids.size(); i += 2) {
        routed.ids[i] = 3;
        routed.ids[i + 1] = -1;
      }
      routed.slot_of = {-1, 0, 1, 2};
      expect_within(run(backend(), experts, routed), reference(experts, routed, store),
                    name + ", one expert");
    }
  }
}

TEST_P(ExpertsTest, WideInt4RowsAreIndependent) {
  Random random(23);
  constexpr std::int64_t kRows = 10;
  const WeightKind kind{WeightFormat::kInt4Group, 32, DType::kBFloat16};
  const Experts shape(backend(), kind, {3, 512, 256}, 24);
  const Routed routed = random_routing(random, kRows, 2, 4, shape);
  expect_row_independence<float>(kRows, [&](Backend& other, const std::vector<std::int64_t>& rows) {
    const Experts experts(other, kind, {3, 512, 256}, 24);
    return run(other, experts, routed.only(rows));
  });
}

// Bits must not depend on which rows share an expert.
TEST_P(ExpertsTest, RowsAreIndependent) {
  Random random(9);
  constexpr std::int64_t kRows = 12;
  const WeightKind kinds[] = {{WeightFormat::kFloat32},
                              {WeightFormat::kBFloat16},
                              {WeightFormat::kInt4Group, 32, DType::kFloat32},
                              {WeightFormat::kInt4Group, 128, DType::kBFloat16}};
  for (const WeightKind& kind : kinds) {
    const std::int64_t hidden = kind.group_size == 0 ? 131 : 128;
    const std::int64_t intermediate = kind.group_size == 0 ? 77 : 128;
    const Experts shape(backend(), kind, {5, hidden, intermediate}, 10);
    const Routed routed = random_routing(random, kRows, 4, 7, shape);
    expect_row_independence<float>(
        kRows, [&](Backend& other, const std::vector<std::int64_t>& rows) {
          const Experts experts(other, kind, {5, hidden, intermediate}, 10);
          return run(other, experts, routed.only(rows));
        });
  }
}

TEST_P(ExpertsTest, MalformedShapesThrow) {
  Random random(11);
  const Experts experts(backend(), {WeightFormat::kFloat32}, {2, 8, 4}, 12);
  auto x = input({1, 8}, activations(random, 8));
  auto ids = make_tensor(backend(), {1, 2}, std::vector<std::int32_t>{0, 1});
  auto weights = make_tensor(backend(), {1, 2}, std::vector<float>{1, 1});
  auto slot_of = make_indices(backend(), {0, 1});
  auto out = output({1, 8});
  const std::int64_t bytes = backend().experts_workspace_bytes(1, 2, 8, 4);
  GuardedTensor workspace(backend(), DType::kUInt8, {bytes});
  const auto set = backend().make_expert_set(experts.views());
  ExpertsParams params = {.experts = set.get(),
                          .x = x.view(),
                          .expert_ids = ids.view(),
                          .expert_weights = weights.view(),
                          .logical_to_slot = slot_of.view(),
                          .output = out.view(),
                          .workspace = workspace.view()};
  backend().experts(params);
  params.workspace = workspace.view().rows(0, bytes - 1);
  EXPECT_THROW(backend().experts(params), Error);
  params.workspace = workspace.view();
  auto narrow = output({1, 7});
  params.output = narrow.view();
  EXPECT_THROW(backend().experts(params), Error);
  params.output = out.view();
  ExpertWeights uneven = experts.views();
  uneven.down = uneven.down.first(1);
  EXPECT_THROW(backend().make_expert_set(uneven), Error);
  params.experts = nullptr;
  EXPECT_THROW(backend().experts(params), Error);
}

}  // namespace
}  // namespace kdtree::ops_test
