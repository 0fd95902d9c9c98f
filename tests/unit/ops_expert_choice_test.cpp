// What follows from a router's choice: the replica of each expert, and counts of real rows.
#include "kernels/replica_choice.h"
#include "tests/unit/op_test.h"

namespace kdtree::ops_test {

namespace {

class ExpertChoiceTest : public OpTest {
 protected:
  // Three experts: slots 4 and 1 hold expert 0; 0 expert 1; 2, 3 and 5 expert 2.
  const std::vector<std::int32_t> offsets_ = {0, 2, 3, 6};
  const std::vector<std::int32_t> slots_ = {4, 1, 0, 2, 3, 5};

  std::vector<std::int32_t> choose(const std::vector<std::int32_t>& ids, std::int64_t k) {
    const std::int64_t rows = static_cast<std::int64_t>(ids.size()) / k;
    GuardedTensor id_tensor(backend(), DType::kInt32, {rows, k}, k + 3);
    id_tensor.upload(ids);
    auto offsets = make_indices(backend(), offsets_);
    auto slots = make_indices(backend(), slots_);
    GuardedTensor targets(backend(), DType::kInt32, {rows, k}, k + 1);
    backend().choose_replicas({.expert_ids = id_tensor.view(),
                               .replica_offsets = offsets.view(),
                               .physical_slots = slots.view(),
                               .targets = targets.view()});
    return targets.download<std::int32_t>();
  }
};
KDTREE_TEST_ALL_BACKENDS(ExpertChoiceTest);

TEST_P(ExpertChoiceTest, TakesASlotOfEachExpert) {
  Random random(1);
  for (const std::int64_t rows : {0, 1, 2, 31, 257, 600}) {
    std::vector<std::int32_t> ids = random.integers(rows * 3, 4);
    for (std::int32_t& id : ids) {
      --id;  // -1 to 2
    }
    const std::vector<std::int32_t> targets = choose(ids, 3);
    ASSERT_EQ(targets.size(), ids.size());
    for (std::size_t pair = 0; pair < ids.size(); ++pair) {
      const std::int32_t id = ids[pair];
      if (id < 0) {
        EXPECT_EQ(targets[pair], -1);
        continue;
      }
      const std::uint32_t bits = row_bits(ids.data() + pair / 3 * 3, 3);
      const auto expert = static_cast<std::size_t>(id);
      const std::int32_t first = offsets_[expert];
      const auto count = static_cast<std::uint32_t>(offsets_[expert + 1] - first);
      EXPECT_EQ(targets[pair],
                slots_[static_cast<std::size_t>(first) + choose_replica(bits, id, count)]);
    }
  }
}

TEST_P(ExpertChoiceTest, EqualRowsAreTreatedAlikeWhereverTheyAre) {
  const std::vector<std::int32_t> row = {2, 0, 1};
  const std::vector<std::int32_t> alone = choose(row, 3);
  const std::vector<std::int32_t> among = choose({0, 1, 2, 1, 0, 2, 2, 0, 1, 0, 2, 1}, 3);
  EXPECT_EQ(alone, std::vector<std::int32_t>(among.begin() + 6, among.begin() + 9));
}

// Rows that share an expert and differ in another are spread over its replicas evenly.
TEST(ReplicaChoice, SpreadsRows) {
  Random random(5);
  for (const std::uint32_t count : {2U, 3U, 8U}) {
    std::vector<int> rows(count);
    const int num_rows = 4000;
    for (int row = 0; row < num_rows; ++row) {
      std::vector<std::int32_t> ids = random.permutation(384);
      ids.resize(8);
      ids[static_cast<std::size_t>(random.below(8))] = 17;
      ++rows[choose_replica(row_bits(ids.data(), 8), 17, count)];
    }
    const double mean = static_cast<double>(num_rows) / count;
    for (const int got : rows) {
      EXPECT_NEAR(got, mean, 5 * std::sqrt(mean));  // five standard deviations of a fair choice
    }
  }
}

TEST_P(ExpertChoiceTest, CountsRealRowsOnTopOfWhatWasThere) {
  // Two sequences of three rows, of which two and one are real.
  auto ids = make_tensor(backend(), {6, 2},
                         std::vector<std::int32_t>{0, 1, 1, 3, 2, 2, 3, -1, 0, 0, 1, 1});
  auto real = make_indices(backend(), {2, 1});
  auto sequences = make_indices(backend(), {0, 0, 0, 1, 1, 1});
  auto row_offsets = make_indices(backend(), {0, 3, 6});
  auto counts = make_tensor(backend(), {4}, std::vector<std::int64_t>{10, 20, 30, 40});
  CountExpertsParams params;
  params.expert_ids = ids.view();
  params.batch.num_rows = 6;
  params.batch.num_sequences = 2;
  params.batch.sequence_index = sequences.view();
  params.batch.row_offsets = row_offsets.view();
  params.batch.num_real_rows = real.view();
  params.counts = counts.view();
  backend().count_experts(params);
  EXPECT_EQ(counts.download<std::int64_t>(), (std::vector<std::int64_t>{11, 22, 30, 42}));

  params.batch.num_real_rows = {};
  backend().count_experts(params);
  EXPECT_EQ(counts.download<std::int64_t>(), (std::vector<std::int64_t>{14, 26, 32, 44}));
}

TEST_P(ExpertChoiceTest, CountsManyRows) {
  Random random(2);
  const std::vector<std::int32_t> ids = random.integers(700 * 8, 48);
  std::vector<std::int64_t> want(48);
  for (const std::int32_t id : ids) {
    ++want[static_cast<std::size_t>(id)];
  }
  auto id_tensor = make_tensor(backend(), {700, 8}, ids);
  auto counts = make_tensor(backend(), {48}, std::vector<std::int64_t>(48, 0));
  CountExpertsParams params;
  params.expert_ids = id_tensor.view();
  params.batch.num_rows = 700;
  params.counts = counts.view();
  backend().count_experts(params);
  EXPECT_EQ(counts.download<std::int64_t>(), want);
}

TEST_P(ExpertChoiceTest, MalformedShapesThrow) {
  auto ids = make_tensor(backend(), {2, 2}, std::vector<std::int32_t>{0, 1, 1, 0});
  auto offsets = make_indices(backend(), offsets_);
  auto slots = make_indices(backend(), slots_);
  GuardedTensor targets(backend(), DType::kInt32, {2, 2});
  ChooseReplicasParams choose = {.expert_ids = ids.view(),
                                 .replica_offsets = offsets.view(),
                                 .physical_slots = slots.view(),
                                 .targets = targets.view()};
  backend().choose_replicas(choose);
  choose.physical_slots = slots.view().rows(0, 2);  // fewer than experts
  EXPECT_THROW(backend().choose_replicas(choose), Error);
  choose.physical_slots = slots.view();
  choose.targets = targets.view().rows(0, 1);
  EXPECT_THROW(backend().choose_replicas(choose), Error);

  auto counts = make_tensor(backend(), {3}, std::vector<std::int64_t>{0, 0, 0});
  CountExpertsParams count;
  count.expert_ids = ids.view();
  count.counts = counts.view();
  count.batch.num_rows = 3;  // the ids have two rows
  EXPECT_THROW(backend().count_experts(count), Error);
}

}  // namespace

}  // namespace kdtree::ops_test
