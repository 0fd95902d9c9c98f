// Experts that move to other slots: the store is then what a load for those slots gives.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "tests/unit/checkpoint_builder.h"
#include "tests/unit/weights_test_support.h"
#include "weights/number_formats.h"
#include "weights/weight_store.h"

namespace kdtree {

namespace {

struct MoveParam {
  const char* name;
  std::int64_t group_size = 0;
  WeightsChoice weights = WeightsChoice::kAuto;
};

void PrintTo(const MoveParam& param, std::ostream* out) {
  *out << param.name;
}

class WeightsMove : public testing::TestWithParam<MoveParam> {
 protected:
  WeightsMove() {
    recipe_.target.moe_intermediate_size = 32;  // whole groups of INT4 that is made at load
    recipe_.target.first_k_dense_replace = 0;
    recipe_.group_size = GetParam().group_size;
    write_bundle(recipe_, folder_ / "model.kdtr");
    checkpoint_ = open_target(folder_ / "model.kdtr");
  }

  WeightStore load(const ExpertPlacement& placement, const LoadOptions& options) {
    return load_target(checkpoint_, placement, options, *backend_);
  }

  // Three ranks, both layers otherwise.
  static ExpertPlacement before() {
    return ExpertPlacement({LayerPlacement(6, {{0, 1}, {2, 3}, {4, 5}}),
                            LayerPlacement(6, {{0, 5}, {1, 4, 0}, {2, 3}})});
  }
  static ExpertPlacement after() {
    return ExpertPlacement({LayerPlacement(6, {{5, 0}, {1, 3}, {2, 4}}),
                            LayerPlacement(6, {{2, 4}, {5, 0, 3}, {3, 1}})});
  }

  CheckpointRecipe recipe_{.target = tiny_target(), .seed = 3};
  TemporaryFolder folder_;
  std::unique_ptr<Backend> backend_ = make_backend({.name = "cpu", .num_threads = 1});
  TargetCheckpoint checkpoint_;
};

std::size_t data_bytes(const WeightView& view) {
  const std::int64_t values = view.out_features * view.in_features;
  switch (view.format) {
    case WeightFormat::kInt4Group:
      return static_cast<std::size_t>(values / 2);
    case WeightFormat::kBFloat16:
      return static_cast<std::size_t>(values * 2);
    default:
      return static_cast<std::size_t>(values * 4);
  }
}

void expect_equal(const WeightView& got, const WeightView& want) {
  ASSERT_EQ(got.format, want.format);
  ASSERT_EQ(got.out_features, want.out_features);
  ASSERT_EQ(got.in_features, want.in_features);
  EXPECT_EQ(std::memcmp(got.data, want.data, data_bytes(want)), 0);
  if (want.format == WeightFormat::kInt4Group) {
    ASSERT_EQ(got.scale_dtype, want.scale_dtype);
    const std::int64_t scales = want.out_features * want.in_features / want.group_size;
    EXPECT_EQ(std::memcmp(got.scales, want.scales,
                          static_cast<std::size_t>(scales * dtype_bytes(want.scale_dtype))),
              0);
  }
}

TEST_P(WeightsMove, GivesWhatALoadForTheNewSlotsGives) {
  const ExpertPlacement kept = after().kept_in_place(before());
  for (int rank = 0; rank < 3; ++rank) {
    LoadOptions options{.rank = rank, .world_size = 3, .weights = GetParam().weights};
    options.piece_bytes = 1024;
    WeightStore moved = load(before(), options);
    const WeightStore fresh = load(kept, options);
    const ExpertPlacement first = before();
    const std::int64_t bytes = moved.bytes();
    // Slot by slot, the memory stays.
    std::vector<const void*> places;
    const auto matrix = [&](const WeightStore& store, const ExpertPlacement& placement,
                            std::int64_t layer, std::size_t slot) {
      return store.matrix(fmt::format("model.layers.{}.mlp.experts.{}.down_proj.weight", layer,
                                      placement.layer(layer).experts_of(rank)[slot]));
    };
    for (std::int64_t layer = 0; layer < 2; ++layer) {
      for (std::size_t slot = 0; slot < kept.layer(layer).experts_of(rank).size(); ++slot) {
        places.push_back(matrix(moved, before(), layer, slot).data);
      }
    }
    const LoadStatistics read = move_experts(checkpoint_, {first, kept}, options, *backend_, moved);
    EXPECT_EQ(moved.bytes(), bytes);
    EXPECT_GT(read.bytes_read, 0);
    EXPECT_LT(read.bytes_read, fresh.load_statistics().bytes_read);
    auto place = places.begin();
    for (std::int64_t layer = 0; layer < 2; ++layer) {
      for (std::size_t slot = 0; slot < kept.layer(layer).experts_of(rank).size(); ++slot) {
        EXPECT_EQ(matrix(moved, kept, layer, slot).data, *place++);
      }
    }
    for (const TensorSpec& spec : target_tensor_specs(checkpoint_.config)) {
      ASSERT_EQ(moved.contains(spec.name), fresh.contains(spec.name)) << spec.name;
      if (!spec.is_vector() && fresh.contains(spec.name)) {
        SCOPED_TRACE(spec.name);
        expect_equal(moved.matrix(spec.name), fresh.matrix(spec.name));
      }
    }
    // And back again; then once more without anything to do.
    const ExpertPlacement back = before().kept_in_place(kept);
    move_experts(checkpoint_, {kept, back}, options, *backend_, moved);
    EXPECT_EQ(move_experts(checkpoint_, {back, back}, options, *backend_, moved).bytes_read, 0);
    expect_equal(matrix(moved, back, 1, 0), matrix(load(back, options), back, 1, 0));
  }
}

TEST_P(WeightsMove, ReportsADamagedFile) {
  const ExpertPlacement kept = after().kept_in_place(before());
  const ExpertPlacement first = before();
  LoadOptions options{.rank = 0, .world_size = 3, .weights = GetParam().weights};
  WeightStore store = load(before(), options);
  const std::string content = read_file(folder_ / "model.kdtr");
  write_file(folder_ / "model.kdtr", content.substr(0, content.size() / 2));
  expect_input_error(
      [&] {
        move_experts(checkpoint_, {first, kept}, options, *backend_, store);
      },
      {"model.kdtr"});
}

INSTANTIATE_TEST_SUITE_P(Formats, WeightsMove,
                         testing::Values(MoveParam{"floats", 0, WeightsChoice::kAuto},
                                         MoveParam{"stored_int4", 16, WeightsChoice::kAuto},
                                         MoveParam{"int4_at_load", 0, WeightsChoice::kInt4}));

TEST(PlacementMoves, KeepWhatStaysInItsSlot) {
  const LayerPlacement before(6, {{0, 1, 2}, {3, 4, 5}});
  const LayerPlacement after(6, {{2, 3, 0}, {1, 4, 5}});
  EXPECT_EQ(after.kept_in_place(before), LayerPlacement(6, {{0, 3, 2}, {1, 4, 5}}));
  EXPECT_TRUE(after.same_slots(before));
  EXPECT_FALSE(after.same_slots(LayerPlacement(6, {{2, 3}, {1, 4, 5, 0}})));
  EXPECT_THROW(after.kept_in_place(LayerPlacement(6, {{2, 3}, {1, 4, 5, 0}})), Error);
  const ExpertPlacement layers({before, after});
  EXPECT_EQ(ExpertPlacement(after).kept_in_place(layers).layer(0),
            LayerPlacement(6, {{0, 3, 2}, {1, 4, 5}}));
  EXPECT_TRUE(layers.same_slots(ExpertPlacement(before)));
}

}  // namespace

}  // namespace kdtree
