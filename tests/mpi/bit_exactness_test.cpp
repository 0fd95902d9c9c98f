// On the CPU a row's bits do not depend on what else is in the call: verified in a tree, in a batch
// or alone after its ancestors, a token has the same logits.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "tests/mpi/decoder_bench.h"
#include "tests/mpi/random_case.h"
#include "tests/mpi/shared_bundle.h"

namespace kdtree {

namespace {

constexpr std::int64_t kTreeNodes = 64;

struct ExactParam {
  const char* format;  // f32, bf16 or int4
  ExchangeKind exchange = ExchangeKind::kAllReduce;
};

void PrintTo(const ExactParam& param, std::ostream* out) {
  *out << param.format << " " << exchange_name(param.exchange);
}

// Wide enough that sums take the kernels' blocked paths and leave remainders.
CheckpointRecipe recipe_of(const ExactParam& param) {
  CheckpointRecipe recipe{.target = tiny_target(), .seed = 5};
  ModelConfig& config = recipe.target;
  config.vocab_size = 101;
  config.hidden_size = 96;
  config.intermediate_size = 136;
  config.moe_intermediate_size = 48;
  config.num_hidden_layers = 3;
  config.n_routed_experts = 10;
  config.num_experts_per_tok = 3;
  config.kv_lora_rank = 40;
  config.qk_nope_head_dim = 20;
  config.rope.yarn = true;
  config.rope.factor = 40;
  config.rope.mscale_all_dim = 1;
  config.rope.original_max_position_embeddings = 64;
  const std::string format = param.format;
  recipe.group_size = format == "int4" ? 16 : 0;
  recipe.scale_dtype = DType::kBFloat16;
  recipe.weight_dtype = format == "f32" ? DType::kFloat32 : DType::kBFloat16;
  return recipe;
}

class BitExactness : public testing::TestWithParam<ExactParam> {
 protected:
  void SetUp() override {
    bundle_.emplace(recipe_of(GetParam()));
    model_.emplace(TestModelOptions{.target = bundle_->path(), .exchange = GetParam().exchange});
    bench_.emplace(*model_, GetParam().exchange, 3);
  }

  Ids random_tokens(Dice& dice, std::int64_t count) const {
    Ids tokens;
    for (std::int64_t i = 0; i < count; ++i) {
      tokens.push_back(static_cast<std::int32_t>(dice.between(0, model_->config().vocab_size - 1)));
    }
    return tokens;
  }
  // Wide and deep parts alike.
  TestTree random_tree(Dice& dice, std::int64_t nodes) const {
    TestTree tree{random_tokens(dice, nodes), {-1}};
    for (std::int64_t node = 1; node < nodes; ++node) {
      const std::int64_t oldest = dice.one_in(2) ? 0 : std::max<std::int64_t>(0, node - 4);
      tree.parents.push_back(static_cast<std::int32_t>(dice.between(oldest, node - 1)));
    }
    return tree;
  }
  // Feeds a slot its prefix in pieces of at most `piece` tokens.
  void start(std::int32_t slot, const Ids& prefix, std::size_t piece) {
    bench_->cache().clear(slot);
    for (std::size_t first = 0; first < prefix.size(); first += piece) {
      const std::size_t count = std::min(piece, prefix.size() - first);
      bench_->append(slot, std::span<const std::int32_t>(prefix).subspan(first, count));
    }
  }

  std::optional<SharedBundle> bundle_;
  std::optional<TestModel> model_;
  std::optional<DecoderBench> bench_;
};

// The nodes from the root to `node`.
Ids path_to(const TestTree& tree, std::int32_t node) {
  Ids path;
  for (; node >= 0; node = tree.parents[static_cast<std::size_t>(node)]) {
    path.insert(path.begin(), node);
  }
  return path;
}

Ids leaves_of(const TestTree& tree) {
  Ids leaves;
  for (std::int32_t node = 0; node < static_cast<std::int32_t>(tree.parents.size()); ++node) {
    if (std::count(tree.parents.begin(), tree.parents.end(), node) == 0) {
      leaves.push_back(node);
    }
  }
  return leaves;
}

TEST_P(BitExactness, ANodeOfATreeHasTheLogitsOfItsPathDecodedAlone) {
  constexpr std::int32_t kTreeSlot = 0;
  constexpr std::int32_t kAloneSlot = 2;
  for (const std::int64_t prefix_length : {0, 1, 17}) {
    Dice dice(static_cast<std::uint64_t>(prefix_length) + 1);
    const Ids prefix = random_tokens(dice, prefix_length);
    const TestTree tree = random_tree(dice, kTreeNodes);
    start(kTreeSlot, prefix, 5);
    const std::vector<Logits> verified = bench_->verify({&kTreeSlot, 1}, {tree});
    ASSERT_EQ(verified.size(), static_cast<std::size_t>(kTreeNodes));
    const Ids leaves = leaves_of(tree);
    for (const std::int32_t leaf : leaves) {
      start(kAloneSlot, prefix, 17);
      for (const std::int32_t node : path_to(tree, leaf)) {
        const auto index = static_cast<std::size_t>(node);
        const std::vector<Logits> alone = bench_->append(kAloneSlot, {&tree.token_ids[index], 1});
        EXPECT_TRUE(same_bits(alone.front(), verified[index]))
            << "prefix " << prefix_length << " node " << node;
      }
    }
    // The slots hold the same once the tree's path is accepted, and go on alike.
    bench_->accept(kTreeSlot, path_to(tree, leaves.back()));
    EXPECT_TRUE(same_bits(bench_->cached(kTreeSlot), bench_->cached(kAloneSlot)));
    const Ids next = random_tokens(dice, 1);
    EXPECT_TRUE(same_bits(bench_->append(kTreeSlot, next).front(),
                          bench_->append(kAloneSlot, next).front()));
  }
}

TEST_P(BitExactness, APromptMayComeInPiecesOfAnySize) {
  Dice dice(7);
  const Ids prompt = random_tokens(dice, 23);
  const std::vector<Logits> whole = (bench_->cache().clear(0), bench_->append(0, prompt));
  for (const std::size_t piece : {1, 2, 7, 22}) {
    bench_->cache().clear(1);
    std::vector<Logits> pieces;
    for (std::size_t first = 0; first < prompt.size(); first += piece) {
      const std::size_t count = std::min(piece, prompt.size() - first);
      for (Logits& row :
           bench_->append(1, std::span<const std::int32_t>(prompt).subspan(first, count))) {
        pieces.push_back(std::move(row));
      }
    }
    ASSERT_EQ(pieces.size(), whole.size());
    for (std::size_t row = 0; row < whole.size(); ++row) {
      EXPECT_TRUE(same_bits(pieces[row], whole[row])) << "pieces of " << piece << " row " << row;
    }
    EXPECT_TRUE(same_bits(bench_->cached(0), bench_->cached(1))) << "pieces of " << piece;
  }
}

TEST_P(BitExactness, ASequenceInABatchHasTheLogitsOfTheSequenceAlone) {
  Dice dice(11);
  const Ids slots = {2, 0, 1};
  std::vector<Ids> prefixes;
  std::vector<TestTree> trees;
  for (const std::int64_t length : {9, 0, 17}) {
    prefixes.push_back(random_tokens(dice, length));
    trees.push_back(random_tree(dice, 10 + length));
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    start(slots[i], prefixes[i], 6);
  }
  const std::vector<Logits> together = bench_->verify(slots, trees);
  std::size_t row = 0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::int32_t slot = slots[(i + 1) % slots.size()];  // another place in the cache
    start(slot, prefixes[i], 4);
    for (const Logits& alone : bench_->verify({&slot, 1}, {trees[i]})) {
      EXPECT_TRUE(same_bits(alone, together.at(row))) << "sequence " << i << " row " << row;
      ++row;
    }
  }
  EXPECT_EQ(row, together.size());
}

// The comparisons above would pass with logits that do not depend on the input.
TEST_P(BitExactness, OtherAncestorsGiveOtherLogits) {
  TestTree tree{{3, 4, 5, 6, 6}, {-1, 0, 0, 1, 2}};
  const std::int32_t slot = 0;
  bench_->cache().clear(slot);
  const std::vector<Logits> logits = bench_->verify({&slot, 1}, {tree});
  EXPECT_FALSE(same_bits(logits[3], logits[4]));
}

INSTANTIATE_TEST_SUITE_P(Formats, BitExactness,
                         testing::Values(ExactParam{"f32", ExchangeKind::kAllReduce},
                                         ExactParam{"f32", ExchangeKind::kAllToAll},
                                         ExactParam{"f32", ExchangeKind::kAllGather},
                                         ExactParam{"bf16", ExchangeKind::kAllReduce},
                                         ExactParam{"bf16", ExchangeKind::kAllToAll},
                                         ExactParam{"bf16", ExchangeKind::kAllGather},
                                         ExactParam{"int4", ExchangeKind::kAllReduce},
                                         ExactParam{"int4", ExchangeKind::kAllToAll},
                                         ExactParam{"int4", ExchangeKind::kAllGather}));

}  // namespace

}  // namespace kdtree
