// Loading: what is wrong with a checkpoint is found, by every rank or by the one that reads it.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "tests/unit/checkpoint_builder.h"
#include "tests/unit/weights_test_support.h"
#include "weights/weight_store.h"

namespace kdtree {
namespace {

std::unique_ptr<Backend> errors_backend() {
  return make_backend({.name = "cpu"});
}

class WeightsLoadErrors : public ::testing::Test {
 protected:
  WeightsLoadErrors() : path_(folder_ / "model.kdtr"), backend_(errors_backend()) { use(recipe_); }

  void use(const CheckpointRecipe& recipe) {
    recipe_ = recipe;
    tensors_ = build_tensors(recipe, BuiltNames::kBundle);
  }
  BuiltTensor& tensor(const std::string& name) {
    for (BuiltTensor& candidate : tensors_) {
      if (candidate.info.name == name) {
        return candidate;
      }
    }
    fail("no tensor {}", name);
  }
  void erase(const std::string& name) {
    std::erase_if(tensors_, [&name](const auto& item) { return item.info.name == name; });
  }
  void write() const { write_built_bundle(build_bundle_header(recipe_), tensors_, path_); }
  void load(const LoadOptions& options = {}) const {
    const auto placement =
        ExpertPlacement::linear(recipe_.target.n_routed_experts, options.world_size);
    load_target(open_target(path_), placement, options, *backend_);
  }
  // Every rank finds it, from the headers alone.
  void expect_found(std::initializer_list<std::string> parts) const {
    write();
    const TargetCheckpoint checkpoint = open_target(path_);
    for (int rank = 0; rank < 3; ++rank) {
      expect_input_error(
          [&] {
            target_bytes(checkpoint, ExpertPlacement::linear(6, 3),
                         {.rank = rank, .world_size = 3});
          },
          parts);
    }
    expect_input_error([&] { load(); }, parts);
  }
  // Flips a bit of the tensor's data in the written file.
  void damage(const std::string& name) const {
    const StoredTensor stored = open_target(path_).tensors.at(name);
    std::string content = read_file(path_);
    content[static_cast<std::size_t>(stored.file_offset + stored.bytes / 2)] ^= 4;
    write_file(path_, content);
  }

  TemporaryFolder folder_;
  std::string path_;
  CheckpointRecipe recipe_{.target = tiny_target(), .group_size = 8};
  std::vector<BuiltTensor> tensors_;
  std::unique_ptr<Backend> backend_;
};

const char* const kBrokenMatrix = "model.layers.0.mlp.down_proj.weight";
const char* const kExpert = "model.layers.1.mlp.experts.5.up_proj.weight";

TEST_F(WeightsLoadErrors, GoodOne) {
  write();
  EXPECT_NO_THROW(load());
}

TEST_F(WeightsLoadErrors, MissingTensors) {
  for (const std::string& name : {std::string(kBrokenMatrix), std::string("model.norm.weight"),
                                  std::string("lm_head.weight")}) {
    use(recipe_);
    erase(name);
    expect_found({path_, name, "is missing"});
  }
  use(recipe_);
  erase(std::string(kExpert) + ".sc");
  expect_found({path_, kExpert, ".sc' is missing"});
  use(recipe_);
  erase(std::string(kExpert) + ".qw");
  expect_found({path_, kExpert, "is missing"});
}

TEST_F(WeightsLoadErrors, UnknownTensors) {
  BuiltTensor more = tensor("model.norm.weight");
  more.info.name = "model.extra.weight";
  tensors_.push_back(more);
  expect_found({path_, "model.extra.weight", "unknown"});
}

TEST_F(WeightsLoadErrors, WrongShapes) {
  tensor(kBrokenMatrix).info.shape = {80, 32};
  expect_found({path_, kBrokenMatrix, "has shape [80, 32], expected [32, 80]"});
  use(recipe_);
  BuiltTensor& words = tensor(std::string(kExpert) + ".qw");
  words.info.shape = {4, 16};
  expect_found({path_, kExpert, ".qw", "has shape [4, 16], expected [16, 4]"});
  use(recipe_);
  BuiltTensor& norm = tensor("model.norm.weight");
  norm.info.shape = {2, 16};
  expect_found({path_, "model.norm.weight", "has shape [2, 16], expected [32]"});
}

TEST_F(WeightsLoadErrors, WrongDtypes) {
  tensor(kBrokenMatrix).info.dtype = DType::kInt32;
  expect_found({path_, kBrokenMatrix, "is I32, expected F32 or BF16 or F16"});
  use(recipe_);
  tensor(std::string(kExpert) + ".sc").info.dtype = DType::kInt32;
  expect_found({path_, kExpert, "is I32, expected F32 or BF16"});
  use(recipe_);
  BuiltTensor& code = tensor(kBrokenMatrix);
  code.info.dtype = DType::kFloat8E4M3;
  code.data.resize(static_cast<std::size_t>(code.info.bytes()));
  expect_found({path_, kBrokenMatrix, "is fp8, but", "_scale_inv' is missing"});
}

TEST_F(WeightsLoadErrors, PackedWithoutAGroupSize) {
  nlohmann::json header = build_bundle_header(recipe_);
  header.erase("quantization");
  write_built_bundle(header, tensors_, path_);
  expect_input_error([&] { load(); }, {path_, "packed INT4", "no quantisation"});
}

TEST_F(WeightsLoadErrors, ChoiceOfWeights) {
  write();
  expect_input_error([&] { load({.weights = WeightsChoice::kOriginal}); },
                     {path_, "experts", "stored as INT4 only"});
  use({.target = tiny_target()});
  write();
  EXPECT_NO_THROW(load({.weights = WeightsChoice::kOriginal}));
  expect_input_error([&] { load({.weights = WeightsChoice::kQuantized}); },
                     {path_, "quantised weights were asked for"});
}

TEST_F(WeightsLoadErrors, MoreRanksThanHeads) {
  write();
  expect_input_error([&] { load({.rank = 5, .world_size = 6}); }, {"6 ranks, 5 attention heads"});
}

TEST_F(WeightsLoadErrors, GroupsThatSpanHeads) {
  CheckpointRecipe recipe = recipe_;
  recipe.group_size = 16;
  recipe.quantize_all = true;
  recipe.target.num_attention_heads = 4;
  use(recipe);
  write();
  EXPECT_NO_THROW(load());
  expect_input_error([&] { load({.rank = 1, .world_size = 2}); },
                     {path_, "o_proj", "groups of 16", "heads of 8", "2 ranks"});
}

TEST_F(WeightsLoadErrors, ChecksumOfWholeTensors) {
  write();
  damage("model.norm.weight");
  expect_input_error([&] { load(); }, {path_, "model.norm.weight", "checksum is", "expected"});
  EXPECT_NO_THROW(load({.verify_checksums = false}));
  write();
  damage(std::string(kExpert) + ".sc");
  // Expert 5 of 6 lives on the last rank.
  EXPECT_NO_THROW(load({.rank = 0, .world_size = 2}));
  expect_input_error([&] { load({.rank = 1, .world_size = 2, .num_threads = 4}); },
                     {path_, kExpert, "checksum"});
}

TEST_F(WeightsLoadErrors, ChecksumOfDividedTensors) {
  for (const std::string& name :
       {std::string(kBrokenMatrix), std::string("model.layers.1.self_attn.kv_b_proj.weight"),
        std::string("lm_head.weight"), std::string("model.layers.1.self_attn.o_proj.weight")}) {
    write();
    damage(name);
    int num_found = 0;
    for (int rank = 0; rank < 3; ++rank) {
      try {
        load({.rank = rank, .world_size = 3});
      } catch (const InputError& error) {
        EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
        ++num_found;
      }
    }
    EXPECT_EQ(num_found, 1) << name;
  }
}

// Every damaged tensor is found by some rank, whatever way it is stored and divided.
TEST_F(WeightsLoadErrors, ChecksumOfEveryTensor) {
  CheckpointRecipe recipe{.target = tiny_target(), .group_size = 8, .quantize_all = true};
  recipe.target.num_hidden_layers = 1;
  recipe.target.first_k_dense_replace = 0;
  recipe.target.n_routed_experts = 2;
  recipe.target.n_group = 1;
  use(recipe);
  write();
  const std::string good = read_file(path_);
  for (const BuiltTensor& built : tensors_) {
    write_file(path_, good);
    damage(built.info.name);
    int num_found = 0;
    for (int rank = 0; rank < 2; ++rank) {
      try {
        load({.rank = rank, .world_size = 2});
      } catch (const InputError&) {
        ++num_found;
      }
    }
    EXPECT_GE(num_found, 1) << built.info.name;
  }
}

TEST_F(WeightsLoadErrors, TruncatedWhileItIsOpen) {
  write();
  const TargetCheckpoint checkpoint = open_target(path_);
  const std::string content = read_file(path_);
  write_file(path_, content.substr(0, content.size() / 2));
  expect_input_error(
      [&] {
        load_target(checkpoint, ExpertPlacement::linear(6, 1), {.num_threads = 4}, *backend_);
      },
      {path_, "ends at byte"});
}

TEST(WeightsLoadDirectory, ChecksWeightShape) {
  const TemporaryFolder folder;
  const CheckpointRecipe recipe{.target = tiny_target(), .group_size = 8};
  write_directory(recipe, folder / "m");
  std::vector<BuiltTensor> tensors = build_tensors(recipe, BuiltNames::kHuggingFace);
  const std::string name = std::string(kExpert) + "_shape";
  for (BuiltTensor& tensor : tensors) {
    if (tensor.info.name == name) {
      const std::int64_t wrong[2] = {32, 16};
      std::memcpy(tensor.data.data(), wrong, sizeof(wrong));
    }
  }
  write_built_safetensors(tensors, folder / "m/model.safetensors");
  const auto backend = errors_backend();
  expect_input_error(
      [&] { load_target(open_target(folder / "m"), ExpertPlacement::linear(6, 1), {}, *backend); },
      {"model.safetensors", name, "[32, 16]", "[16, 32]"});
}

// A bundle's drafter has names of its own.
TEST_F(WeightsLoadErrors, ADraftersTensorIsNamedAsInTheBundle) {
  use({.target = tiny_target(), .drafter = tiny_drafter()});
  erase("drafter.norm.weight");
  write();
  expect_input_error([&] { load_drafter(open_drafter(path_), {}, *backend_); },
                     {path_, "\"drafter.norm.weight\"", "is missing"});
}

}  // namespace
}  // namespace kdtree
