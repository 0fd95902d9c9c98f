// Placements and their files, and files of loads.
#include "placement/placement_file.h"

#include <gtest/gtest.h>

#include "comm/process_group.h"
#include "placement/expert_loads.h"
#include "placement/policies.h"
#include "tests/unit/weights_test_support.h"

namespace kdtree {

namespace {

using Lists = std::vector<std::vector<std::int64_t>>;
using Indices = std::vector<std::int32_t>;

// Five layers, of which 2 and 4 have experts.
ModelConfig small_model() {
  ModelConfig config;
  config.num_hidden_layers = 5;
  config.n_routed_experts = 4;
  config.first_k_dense_replace = 1;
  config.moe_layer_freq = 2;
  return config;
}

ExpertPlacement small_placement() {
  const LayerPlacement other(4, {{0, 1}, {2, 3}});
  return ExpertPlacement({other, other, LayerPlacement(4, {{3, 0}, {1, 2, 0}}), other,
                          LayerPlacement(4, {{}, {3, 2, 1, 0}})});
}

TEST(PlacementLayer, TablesFollowTheSlots) {
  const LayerPlacement placement(4, {{3, 0}, {1, 2, 0}});
  EXPECT_TRUE(placement.has_replicas());
  EXPECT_EQ(placement.num_slots(), 5);
  EXPECT_EQ(placement.num_targets(), 5);
  EXPECT_EQ(placement.ranks_of_targets(), (Indices{0, 0, 1, 1, 1}));
  EXPECT_EQ(placement.slots_on(0), (Indices{0, 1, -1, -1, -1}));
  EXPECT_EQ(placement.slots_on(1), (Indices{-1, -1, 0, 1, 2}));
  EXPECT_EQ(placement.replica_offsets(), (Indices{0, 2, 3, 4, 5}));
  EXPECT_EQ(placement.physical_slots(), (Indices{1, 4, 2, 3, 0}));
  EXPECT_TRUE(placement.holds(1, 0));
  EXPECT_FALSE(placement.holds(0, 1));
}

TEST(PlacementLayer, WithoutReplicasTargetsAreExperts) {
  const LayerPlacement placement(3, {{2}, {}, {1, 0}});
  EXPECT_FALSE(placement.has_replicas());
  EXPECT_EQ(placement.ranks_of_targets(), (Indices{2, 2, 0}));
  EXPECT_EQ(placement.slots_on(0), (Indices{-1, -1, 0}));
  EXPECT_EQ(placement.slots_on(1), (Indices{-1, -1, -1}));
  EXPECT_EQ(placement.slots_on(2), (Indices{1, 0, -1}));
}

TEST(PlacementLayer, RefusesWhatIsNoPlacement) {
  EXPECT_THROW(LayerPlacement(2, {}), Error);
  EXPECT_THROW(LayerPlacement(2, {{0}, {0}}), Error);
  EXPECT_THROW(LayerPlacement(2, {{0, 1, 0}}), Error);
  EXPECT_THROW(LayerPlacement(2, {{0, 1}, {2}}), Error);
  EXPECT_THROW(LayerPlacement(2, {{0, 1}, {-1}}), Error);
  EXPECT_THROW(ExpertPlacement(std::vector<LayerPlacement>{}), Error);
  EXPECT_THROW(ExpertPlacement({LayerPlacement(1, {{0}}), LayerPlacement(1, {{0}, {}})}), Error);
}

TEST(PlacementFile, IsReadAsWritten) {
  const TemporaryFolder folder;
  const ModelConfig config = small_model();
  const ExpertPlacement placement = small_placement();
  write_file(folder / "p.json", to_json(placement, config).dump());
  const ExpertPlacement read = read_placement(folder / "p.json", config, 2);
  EXPECT_EQ(read.layer(2), placement.layer(2));
  EXPECT_EQ(read.layer(4), placement.layer(4));
  EXPECT_EQ(read.world_size(), 2);

  write_file(folder / "linear.json", to_json(ExpertPlacement::linear(4, 3), config).dump());
  EXPECT_EQ(read_placement(folder / "linear.json", config, 3).layer(4),
            ExpertPlacement::linear(4, 3).layer(3));
}

TEST(PlacementFile, TravelsFromRankZero) {
  const auto group = make_self_process_group();
  EXPECT_EQ(share_placement(small_placement(), *group).layers(), small_placement().layers());
  const ExpertPlacement linear = share_placement(ExpertPlacement::linear(5, 1), *group);
  EXPECT_TRUE(linear.alike());
  EXPECT_EQ(linear.layer(7), ExpertPlacement::linear(5, 1).layer(0));
}

struct BadFile {
  std::string path;  // JSON pointer to what is replaced
  std::string value;
  std::string words;
};

TEST(PlacementFile, ErrorsNameFileKeyValueAndExpectation) {
  const TemporaryFolder folder;
  const ModelConfig config = small_model();
  const nlohmann::json good = to_json(small_placement(), config);
  const std::vector<BadFile> cases = {
      {"/format", "\"x\"", "key 'format' is \"x\", expected kdtree-expert-placement"},
      {"/version", "2", "key 'version' is 2, expected 1"},
      {"/num_hidden_layers", "6", "key 'num_hidden_layers' is 6, expected 5"},
      {"/n_routed_experts", "8", "key 'n_routed_experts' is 8, expected 4"},
      {"/ranks", "3", "key 'ranks' is 3, expected 2, as many as this run has"},
      {"/ranks", "null", "key 'ranks' is null, expected 2"},
      {"/layers", "[]", "key 'layers' is [], expected a list of 2 entries"},
      {"/layers/1", "7", "layers[1] is 7, expected a JSON object"},
      {"/layers/1/layer", "3", "key 'layers[1].layer' is 3, expected 4"},
      {"/layers/0/slots", "[[0,1,2,3]]",
       "key 'layers[0].slots' is [[0,1,2,3]], expected a list "
       "of 2 lists of experts, one for each rank"},
      {"/layers/0/slots/1", "3", "key 'layers[0].slots[1]' is 3, expected a list of integers"},
      {"/layers/0/slots/1", "null", "key 'layers[0].slots[1]' is null, expected a list of experts"},
      {"/layers/0/slots/1", "[1,2,4]",
       "key 'layers[0].slots[1]' is [1,2,4], expected a list; each element an integer from 0 to 3"},
      {"/layers/0/slots/1", "[1,2,0.5]", "each element an integer from 0 to 3"},
      {"/layers/0/slots/1", "[1,2,1]", "expected every expert once at most, and 1 is there twice"},
      {"/layers/1/slots/1", "[3,2,0]", "expected every expert on a rank, and 1 is on none"}};
  for (const BadFile& bad : cases) {
    nlohmann::json json = good;
    json[nlohmann::json::json_pointer(bad.path)] = nlohmann::json::parse(bad.value);
    write_file(folder / "bad.json", json.dump());
    expect_input_error([&] { read_placement(folder / "bad.json", config, 2); },
                       {"bad.json", bad.words});
  }
  write_file(folder / "bad.json", "[]");
  expect_input_error([&] { read_placement(folder / "bad.json", config, 2); },
                     {"bad.json: the whole file is [], expected a JSON object"});
  expect_input_error([&] { read_placement(folder / "none.json", config, 2); }, {"none.json"});
}

TEST(ExpertLoadFile, IsReadAsWritten) {
  const TemporaryFolder folder;
  const ModelConfig config = small_model();
  ExpertLoads loads = empty_loads(config);
  EXPECT_EQ(loads.layers, (Lists{{}, {}, {0, 0, 0, 0}, {}, {0, 0, 0, 0}}));
  loads.layers[4] = {5, 0, 123456789012, 2};
  write_file(folder / "load.json", to_json(loads, config).dump());
  EXPECT_EQ(read_expert_loads(folder / "load.json", config), loads);
}

TEST(ExpertLoadFile, ErrorsNameFileKeyValueAndExpectation) {
  const TemporaryFolder folder;
  const ModelConfig config = small_model();
  const nlohmann::json good = to_json(empty_loads(config), config);
  const std::vector<BadFile> cases = {
      {"/format", "\"kdtree-expert-placement\"", "expected kdtree-expert-load"},
      {"/n_routed_experts", "5", "key 'n_routed_experts' is 5, expected 4"},
      {"/layers/0/counts", "[1,2,3]",
       "key 'layers[0].counts' is [1,2,3], expected a list of 4 integers, one for each expert"},
      {"/layers/0/counts", "[1,2,3,-1]", "each element an integer from 0 to"},
      {"/layers/1/counts", "\"many\"", "key 'layers[1].counts' is \"many\", expected a list"}};
  for (const BadFile& bad : cases) {
    nlohmann::json json = good;
    json[nlohmann::json::json_pointer(bad.path)] = nlohmann::json::parse(bad.value);
    write_file(folder / "bad.json", json.dump());
    expect_input_error([&] { read_expert_loads(folder / "bad.json", config); },
                       {"bad.json", bad.words});
  }
}

}  // namespace

}  // namespace kdtree
