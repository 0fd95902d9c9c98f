// tree_attention of any number of nodes behind prefixes of any length.
#include "tests/unit/op_tree_attention.h"

namespace kdtree::ops_test {
namespace {

constexpr std::int64_t kLargeSlots = 2;
constexpr std::int64_t kLargeCapacity = 8704;  // the longest prefix and tree, and a spare row

constexpr MlaShape kOddWidth = {.num_heads = 3,
                                .qk_nope_head_dim = 8,
                                .qk_rope_head_dim = 6,
                                .v_head_dim = 8,
                                .kv_lora_rank = 17};

// The latent rows of DeepSeek-V3 and Kimi K2.
constexpr MlaShape full_width(std::int64_t num_heads) {
  return {.num_heads = num_heads,
          .qk_nope_head_dim = 128,
          .qk_rope_head_dim = 64,
          .v_head_dim = 128,
          .kv_lora_rank = 512};
}

class TreeAttentionSizesTest : public TreeAttentionOpTest {
 protected:
  // More heads, for which CUDA has other kernels, would take the CPU minutes.
  std::vector<MlaShape> shapes() {
    std::vector<MlaShape> all = {kOddWidth, full_width(2)};
    if (backend().name() != "cpu") {
      all.push_back(full_width(8));
      all.push_back(full_width(32));
    }
    return all;
  }

  Data random_data(Random& random, const MlaShape& shape, std::int64_t rows) const {
    return {.shape = shape,
            .capacity = kLargeCapacity,
            .query = activations(random, rows * shape.num_heads * shape.latent_dim(), -2, 2),
            .cache = activations(random, kLargeSlots * kLargeCapacity * shape.latent_dim())};
  }

  // Where there are many heads the query's rows are dense, which one of CUDA's kernels needs.
  std::vector<float> attend(Backend& other, const std::vector<HostSequence>& sequences,
                            const Data& data, const ConstTensorView& cache) {
    return run_on(other, sequences, data, cache, true, data.shape.num_heads % 8 == 0 ? 0 : 4);
  }

  static HostSequence first_nodes(const HostSequence& tree, std::int64_t count) {
    HostSequence first = tree;
    first.parents.resize(static_cast<std::size_t>(count));
    return first;
  }
  static Data first_rows(const Data& data, std::int64_t count) {
    return {.shape = data.shape,
            .capacity = data.capacity,
            .query = {data.query.begin(), data.query.begin() + count * data.query_width()},
            .cache = {}};
  }

  void expect_nodes(const std::vector<float>& got, const HostSequence& tree,
                    const std::vector<std::int64_t>& nodes, const Data& data,
                    const std::string& what) const {
    Expected want;
    for (const std::int64_t node : nodes) {
      add_node(tree, static_cast<std::int32_t>(node), node, data, want);
    }
    expect_within(choose_rows(got, nodes, data.out_width()), want, what);
  }

  static std::string describe(const MlaShape& shape, const HostSequence& tree) {
    return std::to_string(shape.num_heads) + " heads of " + std::to_string(shape.latent_dim()) +
           ", " + std::to_string(tree.num_nodes()) + " nodes behind " + std::to_string(tree.prefix);
  }
};
KDTREE_TEST_ALL_BACKENDS(TreeAttentionSizesTest);

// A node's bits in a tree of any size are those in the largest one, whose own are right.
TEST_P(TreeAttentionSizesTest, EveryNumberOfNodes) {
  Random random(1);
  for (const MlaShape& shape : shapes()) {
    const Data data = random_data(random, shape, kMostRows);
    auto cache = make_floats(backend(), activation(), data.cache_shape(), data.cache);
    std::vector<std::int32_t> prefixes = {0, 33, 257};
    if (shape.latent_dim() < 64 || backend().name() != "cpu") {
      prefixes.push_back(8191);
    }
    for (const std::int32_t prefix : prefixes) {
      const HostSequence tree = {
          .slot = 1, .prefix = prefix, .parents = random_tree(random, kMostRows)};
      const auto got = attend(backend(), {tree}, data, cache.view());
      expect_nodes(got, tree, kSampledRows, data, describe(shape, tree));
      for (const std::int64_t count : kRowCounts) {
        const HostSequence small = first_nodes(tree, count);
        const std::vector<float> want(got.begin(), got.begin() + count * data.out_width());
        expect_same_bits(attend(once(), {small}, first_rows(data, count), cache.view()), want,
                         describe(shape, small));
      }
    }
  }
}

// Every length of the prefix; the same bits for fewer nodes and between other sequences.
TEST_P(TreeAttentionSizesTest, EveryPrefix) {
  Random random(2);
  constexpr std::int64_t kNodes = 33;
  for (const MlaShape& shape : shapes()) {
    const Data data = random_data(random, shape, kNodes);
    auto cache = make_floats(backend(), activation(), data.cache_shape(), data.cache);
    for (const std::int32_t prefix : kPrefixLengths) {
      const HostSequence tree = {
          .slot = 1, .prefix = prefix, .parents = random_tree(random, kNodes)};
      const auto got = attend(backend(), {tree}, data, cache.view());
      expect_nodes(got, tree, {0, 16, 32}, data, describe(shape, tree));
      for (const std::int64_t count : {1, 17}) {
        const HostSequence small = first_nodes(tree, count);
        const std::vector<float> want(got.begin(), got.begin() + count * data.out_width());
        expect_same_bits(attend(once(), {small}, first_rows(data, count), cache.view()), want,
                         describe(shape, small));
      }
      // Its rows stand in the middle, at another place of a tile, with a wider mask.
      const HostSequence before = {.slot = 0, .prefix = 40, .parents = random_tree(random, 5)};
      const HostSequence after = {.slot = 0, .prefix = 0, .parents = random_tree(random, 70)};
      Data all = first_rows(data, 5);
      all.query.insert(all.query.end(), data.query.begin(), data.query.end());
      const auto more = activations(random, 70 * data.query_width(), -2, 2);
      all.query.insert(all.query.end(), more.begin(), more.end());
      const auto among = attend(once(), {before, tree, after}, all, cache.view());
      const std::vector<float> between(among.begin() + 5 * data.out_width(),
                                       among.begin() + (5 + kNodes) * data.out_width());
      expect_same_bits(between, got, describe(shape, tree) + ", between others");
    }
  }
}

// Nothing that another call has left in a backend's scratch memory is read: here NaN, of more nodes
// behind a longer prefix.
TEST_P(TreeAttentionSizesTest, ScratchOfAnotherCall) {
  Random random(3);
  for (const MlaShape& shape : shapes()) {
    const Data data = random_data(random, shape, 65);
    Data nan = data;
    nan.query.assign(nan.query.size(), NAN);
    auto cache = make_floats(backend(), activation(), data.cache_shape(), data.cache);
    const HostSequence far = {.slot = 0, .prefix = 8191, .parents = random_tree(random, 65)};
    const auto left = attend(once(), {far}, nan, cache.view());
    EXPECT_TRUE(std::isnan(left.front()) && std::isnan(left.back()));
    for (const std::int32_t prefix : {0, 257}) {
      const HostSequence tree = {.slot = 1, .prefix = prefix, .parents = random_tree(random, 33)};
      const Data rows = first_rows(data, 33);
      const auto got = attend(once(), {tree}, rows, cache.view());
      const auto fresh = make_test_backend(GetParam(), 1);
      expect_same_bits(got, attend(*fresh, {tree}, rows, cache.view()), describe(shape, tree));
    }
  }
}

}  // namespace
}  // namespace kdtree::ops_test
