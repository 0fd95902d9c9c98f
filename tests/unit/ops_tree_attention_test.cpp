#include "tests/unit/op_tree_attention.h"

namespace kdtree::ops_test {
namespace {

constexpr std::int64_t kSlots = 4;
constexpr std::int64_t kCapacity = 230;

class TreeAttentionTest : public TreeAttentionOpTest {
 protected:
  Data random_data(Random& random, const MlaShape& shape, std::int64_t rows) const {
    return {.shape = shape,
            .capacity = kCapacity,
            .query = activations(random, rows * shape.num_heads * shape.latent_dim(), -2, 2),
            .cache = activations(random, kSlots * kCapacity * shape.latent_dim())};
  }
};
KDTREE_TEST_ALL_BACKENDS(TreeAttentionTest);

constexpr MlaShape kAttentionShapes[] = {
    {.num_heads = 1,
     .qk_nope_head_dim = 8,
     .qk_rope_head_dim = 2,
     .v_head_dim = 8,
     .kv_lora_rank = 4},
    {.num_heads = 3,
     .qk_nope_head_dim = 8,
     .qk_rope_head_dim = 6,
     .v_head_dim = 8,
     .kv_lora_rank = 17},
    {.num_heads = 2,
     .qk_nope_head_dim = 8,
     .qk_rope_head_dim = 16,
     .v_head_dim = 8,
     .kv_lora_rank = 64},
};

TEST_P(TreeAttentionTest, MatchesDoublePrecision) {
  Random random(1);
  for (const MlaShape& shape : kAttentionShapes) {
    // Trees around the borders of the mask's words; a prefix of none; slots out of order.
    const std::vector<std::vector<HostSequence>> batches = {
        {{.slot = 0, .prefix = 0, .parents = {-1}}},
        {{.slot = 2, .prefix = 7, .parents = random_tree(random, 13)}},
        {{.slot = 3, .prefix = 0, .parents = random_tree(random, 64)},
         {.slot = 0, .prefix = 33, .parents = random_tree(random, 65)},
         {.slot = 1, .prefix = 100, .parents = random_tree(random, 130)}},
    };
    for (const auto& sequences : batches) {
      std::int64_t rows = 0;
      for (const HostSequence& sequence : sequences) {
        rows += sequence.num_nodes();
      }
      const Data data = random_data(random, shape, rows);
      expect_within(run(backend(), sequences, data, true), expect_attention(sequences, data),
                    "tree_attention");
    }
  }
}

// The width of DeepSeek-V3 and Kimi K2, for which backends have kernels of their own; a row's bits
// must not depend on how many rows there are, whatever kernel or tile serves them.
TEST_P(TreeAttentionTest, FullWidth) {
  Random random(9);
  for (const std::int64_t heads : {1, 8, 64}) {
    const MlaShape shape = {.num_heads = heads,
                            .qk_nope_head_dim = 128,
                            .qk_rope_head_dim = 64,
                            .v_head_dim = 128,
                            .kv_lora_rank = 512};
    const std::vector<HostSequence> sequences = {
        {.slot = 2, .prefix = 33, .parents = random_tree(random, heads == 64 ? 5 : 17)},
        {.slot = 0, .prefix = 0, .parents = random_tree(random, 3)},
        {.slot = 1, .prefix = 200, .parents = {-1}}};
    const std::int64_t rows = sequences[0].num_nodes() + 4;
    const Data data = random_data(random, shape, rows);
    const Expected want = expect_attention(sequences, data);
    for (const std::int64_t query_gap : {0, 4, 8}) {
      const auto got = run(backend(), sequences, data, true, query_gap);
      expect_within(got, want, "heads " + std::to_string(heads));
      expect_same_bits(run(backend(), sequences, data, true, query_gap), got, "run again");
      // The first node of the first tree, alone behind the same prefix.
      const std::int64_t query_width = heads * shape.latent_dim();
      const Data alone = {shape, kCapacity, row_of(data.query, 0, query_width), data.cache};
      expect_same_bits(
          run(backend(), {{.slot = 2, .prefix = 33, .parents = {-1}}}, alone, true, query_gap),
          row_of(got, 0, heads * shape.kv_lora_rank), "node alone");
    }
  }
}

TEST_P(TreeAttentionTest, ChainsNeedNoMask) {
  Random random(2);
  for (const MlaShape& shape : kAttentionShapes) {
    const std::vector<HostSequence> sequences = {{.slot = 1, .prefix = 5, .parents = chain(70)},
                                                 {.slot = 0, .prefix = 0, .parents = chain(3)}};
    const Data data = random_data(random, shape, 73);
    const auto got = run(backend(), sequences, data, false);
    expect_within(got, expect_attention(sequences, data), "chain without a mask");
    expect_same_bits(got, run(backend(), sequences, data, true), "chain with and without a mask");
  }
}

TEST_P(TreeAttentionTest, NoRows) {
  Random random(3);
  const MlaShape& shape = kAttentionShapes[1];
  EXPECT_TRUE(run(backend(), {}, random_data(random, shape, 0), true).empty());
  EXPECT_TRUE(
      run(backend(), {{.slot = 1, .prefix = 9, .parents = {}}}, random_data(random, shape, 0), true)
          .empty());
}

// What lies in the cache beyond the visible rows must not matter, not even NaN.
TEST_P(TreeAttentionTest, InvisibleRowsAreNotRead) {
  Random random(4);
  const MlaShape& shape = kAttentionShapes[1];
  const std::vector<HostSequence> sequences = {{.slot = 1, .prefix = 3, .parents = {-1, 0, 0, 2}}};
  Data data = random_data(random, shape, 4);
  const auto want = run(backend(), sequences, data, true);
  for (std::int64_t slot = 0; slot < kSlots; ++slot) {
    for (std::int64_t k = 0; k < kCapacity; ++k) {
      if (slot != 1 || k >= 7) {
        std::fill_n(data.cache.begin() + (slot * kCapacity + k) * shape.latent_dim(),
                    shape.latent_dim(), NAN);
      }
    }
  }
  expect_same_bits(run(backend(), sequences, data, true), want, "NaN in foreign rows");
  // Row 4, node 1, is seen by itself alone.
  std::fill_n(data.cache.begin() + (kCapacity + 4) * shape.latent_dim(), shape.latent_dim(), NAN);
  const auto got = run(backend(), sequences, data, true);
  const std::int64_t width = shape.num_heads * shape.kv_lora_rank;
  for (const std::int64_t row : {0, 2, 3}) {
    expect_same_bits(row_of(got, row, width), row_of(want, row, width), "NaN in a sibling's row");
  }
  EXPECT_TRUE(std::isnan(row_of(got, 1, width)[0]));
}

// Scores far apart: without subtracting the maximum exp would overflow.
TEST_P(TreeAttentionTest, LargeScores) {
  const MlaShape shape = {.num_heads = 1,
                          .qk_nope_head_dim = 8,
                          .qk_rope_head_dim = 2,
                          .v_head_dim = 8,
                          .kv_lora_rank = 2};
  std::vector<float> cache(static_cast<std::size_t>(kSlots * kCapacity * 4));
  cache[0] = 1000.0F;
  cache[4] = -1000.0F;
  const std::vector<float> query = {8, 0, 0, 0};
  const auto got = run(backend(), {{.slot = 0, .prefix = 1, .parents = {-1}}},
                       {shape, kCapacity, query, cache}, true);
  EXPECT_EQ(got, (std::vector<float>{1000, 0}));
}

// The promise that makes speculation lossless: a node verified inside a tree has the bits of the
// same token decoded alone behind its committed ancestors. Where the split of the keys may follow
// the prefix, both lie within the bound of the same exact value.
TEST_P(TreeAttentionTest, NodeOfATreeEqualsItsPathCommitted) {
  Random random(5);
  const MlaShape full_width = {.num_heads = 1,
                               .qk_nope_head_dim = 128,
                               .qk_rope_head_dim = 64,
                               .v_head_dim = 128,
                               .kv_lora_rank = 512};
  for (const MlaShape& shape :
       {kAttentionShapes[0], kAttentionShapes[1], kAttentionShapes[2], full_width}) {
    for (const std::int32_t prefix : {0, 1, 30, 64}) {
      const HostSequence tree = {.slot = 2, .prefix = prefix, .parents = random_tree(random, 64)};
      const Data data = random_data(random, shape, 64);
      const std::int64_t latent = shape.latent_dim();
      const std::int64_t width = data.out_width();
      const auto got = run(backend(), {tree}, data, true);
      for (std::int32_t node = 0; node < 64; ++node) {
        const auto path = tree.path(node);
        Data committed = data;
        committed.query = row_of(data.query, node, data.query_width());
        for (std::size_t i = 0; i < path.size(); ++i) {
          const std::int64_t first = (2 * kCapacity + prefix) * latent;
          std::copy_n(data.cache.begin() + first + path[i] * latent, latent,
                      committed.cache.begin() + first + static_cast<std::int64_t>(i) * latent);
        }
        std::vector<HostSequence> alone(1);
        alone[0].slot = 2;
        alone[0].prefix = prefix + static_cast<std::int32_t>(path.size()) - 1;
        alone[0].parents.assign(1, -1);
        const auto plain = run(once(), alone, committed, false);
        const std::string name = "node " + std::to_string(node);
        if (backend().name() == "cpu") {
          expect_same_bits(row_of(got, node, width), plain, name);
          continue;
        }
        Expected want;
        add_node(tree, node, node, data, want);
        expect_within(plain, want, name + " decoded plainly");
        for (std::size_t c = 0; c < plain.size(); ++c) {
          want.values[c] = plain[c];
          want.bounds[c] *= 2;
        }
        expect_within(row_of(got, node, width), want, name + " against plain decoding");
      }
    }
  }
}

TEST_P(TreeAttentionTest, SequencesAreIndependent) {
  Random random(6);
  constexpr std::int64_t kNodes = 33;
  const MlaShape shape = {.num_heads = 5,
                          .qk_nope_head_dim = 8,
                          .qk_rope_head_dim = 6,
                          .v_head_dim = 8,
                          .kv_lora_rank = 37};
  std::vector<HostSequence> sequences;
  sequences.reserve(kSlots);
  for (std::int32_t s = 0; s < kSlots; ++s) {
    sequences.push_back({.slot = 3 - s, .prefix = 20 * s, .parents = random_tree(random, kNodes)});
  }
  const Data data = random_data(random, shape, kSlots * kNodes);
  const std::int64_t cols = kNodes * shape.num_heads * shape.latent_dim();
  expect_row_independence<float>(
      kSlots, [&](Backend& other, const std::vector<std::int64_t>& chosen) {
        return run(other, choose_rows(sequences, chosen, 1),
                   {shape, kCapacity, choose_rows(data.query, chosen, cols), data.cache}, true);
      });
}

TEST_P(TreeAttentionTest, MalformedShapesThrow) {
  Random random(7);
  const MlaShape& shape = kAttentionShapes[0];
  const DeviceBatch batch(backend(), {{.slot = 0, .prefix = 0, .parents = random_tree(random, 65)}},
                          true);
  auto query = input({65, 6}, activations(random, 390));
  auto cache = input({1, 65, 6}, activations(random, 390));
  auto out = output({65, 4});
  TreeAttentionParams params = {.shape = shape,
                                .softmax_scale = 1,
                                .query = query.view(),
                                .cache = cache.view(),
                                .batch = batch.view(),
                                .output = out.view()};
  backend().tree_attention(params);
  auto narrow = output({65, 3});
  params.output = narrow.view();
  EXPECT_THROW(backend().tree_attention(params), Error);
  params.output = out.view();
  auto flat = input({65, 6}, activations(random, 390));
  params.cache = flat.view();
  EXPECT_THROW(backend().tree_attention(params), Error);
  params.cache = cache.view();
  params.batch.ancestor_mask = batch.view().ancestor_mask.columns(0, 1);  // no bit for node 64
  if (backend().name() ==
      "cpu") {  // what needs the values of index tensors is checked where they are at hand
    EXPECT_THROW(backend().tree_attention(params), Error);
    params.batch = batch.view();
    auto small = input({1, 64, 6}, activations(random, 384));
    params.cache = small.view();
    EXPECT_THROW(backend().tree_attention(params), Error);
  }
}

}  // namespace
}  // namespace kdtree::ops_test
