#include "tests/unit/op_test.h"

namespace kdtree::ops_test {
namespace {

struct ChosenTree {
  std::vector<std::int32_t> token_ids;
  std::vector<std::int32_t> parents;
  std::vector<std::int32_t> choices;  // of the target, at every node
};

struct Accepted {
  std::vector<std::int32_t> path;
  std::int32_t bonus = 0;
  bool operator==(const Accepted&) const = default;
};

class AcceptTest : public OpTest {
 protected:
  std::vector<Accepted> accept(const std::vector<ChosenTree>& trees, std::int64_t max_nodes,
                               std::int64_t max_path) {
    const auto sequences = static_cast<std::int64_t>(trees.size());
    std::vector<std::int32_t> counts;
    std::vector<std::int32_t> offsets = {0};
    std::vector<std::int32_t> tokens;
    std::vector<std::int32_t> parents;
    std::vector<std::int32_t> choices;
    for (const ChosenTree& tree : trees) {
      counts.push_back(static_cast<std::int32_t>(tree.parents.size()));
      choices.insert(choices.end(), tree.choices.begin(), tree.choices.end());
      offsets.push_back(static_cast<std::int32_t>(choices.size()));
      tokens.insert(tokens.end(), tree.token_ids.begin(), tree.token_ids.end());
      parents.insert(parents.end(), tree.parents.begin(), tree.parents.end());
      // Behind the nodes stands a child of the root that would be taken for token 0.
      tokens.resize(static_cast<std::size_t>(max_nodes) * counts.size(), 0);
      parents.resize(static_cast<std::size_t>(max_nodes) * counts.size(), 0);
    }
    auto num_nodes = make_indices(backend(), counts);
    auto token_ids = make_tensor(backend(), {sequences, max_nodes}, tokens);
    auto parent = make_tensor(backend(), {sequences, max_nodes}, parents);
    GuardedTensor depths(backend(), DType::kInt32, {sequences, max_nodes});
    auto choice = make_indices(backend(), choices);
    auto row_offsets = make_indices(backend(), offsets);
    GuardedTensor lengths(backend(), DType::kInt32, {sequences});
    GuardedTensor paths(backend(), DType::kInt32, {sequences, max_path});
    GuardedTensor bonus(backend(), DType::kInt32, {sequences});
    backend().accept({.trees = {num_nodes.view(), token_ids.view(), parent.view(), depths.view()},
                      .choices = choice.view(),
                      .row_offsets = row_offsets.view(),
                      .path_lengths = lengths.view(),
                      .paths = paths.view(),
                      .bonus_tokens = bonus.view()});
    const auto got_lengths = lengths.download<std::int32_t>();
    const auto got_paths = paths.download<std::int32_t>();
    const auto got_bonus = bonus.download<std::int32_t>();
    std::vector<Accepted> accepted;
    for (std::size_t s = 0; s < trees.size(); ++s) {
      EXPECT_GE(got_lengths[s], 1);
      EXPECT_LE(got_lengths[s], max_path);
      auto path = row_of(got_paths, static_cast<std::int64_t>(s), max_path);
      path.resize(static_cast<std::size_t>(std::clamp<std::int64_t>(got_lengths[s], 0, max_path)));
      accepted.push_back({path, got_bonus[s]});
    }
    return accepted;
  }
};
KDTREE_TEST_ALL_BACKENDS(AcceptTest);

// From the definition: again and again the lowest child that holds the choice; only nodes behind
// their parent count.
Accepted reference(const ChosenTree& tree, std::size_t max_path) {
  Accepted accepted = {{0}, 0};
  while (accepted.path.size() < max_path) {
    const std::int32_t current = accepted.path.back();
    const std::int32_t wanted = tree.choices[static_cast<std::size_t>(current)];
    std::int32_t child = -1;
    for (auto node = static_cast<std::int32_t>(tree.parents.size()) - 1; node > current; --node) {
      const auto n = static_cast<std::size_t>(node);
      child = tree.parents[n] == current && tree.token_ids[n] == wanted ? node : child;
    }
    if (child < 0) {
      break;
    }
    accepted.path.push_back(child);
  }
  accepted.bonus = tree.choices[static_cast<std::size_t>(accepted.path.back())];
  return accepted;
}

// Few different tokens, 0 among them, so that paths are long and children of one parent sometimes
// equal.
ChosenTree random_tree(Random& random, std::int64_t num_nodes, bool malformed) {
  ChosenTree tree = {random.integers(num_nodes, 2), {-1}, random.integers(num_nodes, 2)};
  for (std::int64_t node = 1; node < num_nodes; ++node) {
    const std::int64_t back = 1 + random.below(std::min<std::int64_t>(node, 4));
    std::int64_t parent = node - back;
    if (malformed && random.below(3) == 0) {
      parent = random.below(num_nodes + 10) - 5;  // itself, later nodes, none, beyond the tree
    }
    tree.parents.push_back(static_cast<std::int32_t>(parent));
  }
  if (malformed && random.below(2) == 0) {
    tree.parents[0] = static_cast<std::int32_t>(random.below(num_nodes));
  }
  return tree;
}

TEST_P(AcceptTest, WorkedExample) {
  // 0 -> 1 (token 7), 2 (token 0); 2 -> 3 (token 5); 3 -> 4 (token 5)
  const ChosenTree tree = {{9, 7, 0, 5, 5}, {-1, 0, 0, 2, 3}, {0, 1, 5, 6, 5}};
  EXPECT_EQ(accept({tree}, 5, 4), (std::vector<Accepted>{{{0, 2, 3}, 6}}));
}

TEST_P(AcceptTest, RootAlone) {
  EXPECT_EQ(accept({{{4}, {-1}, {0}}}, 8, 1), (std::vector<Accepted>{{{0}, 0}}));
  EXPECT_TRUE(accept({}, 8, 3).empty());
}

TEST_P(AcceptTest, RandomTrees) {
  Random random(1);
  std::size_t longest = 0;
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::vector<ChosenTree> trees;
    std::vector<Accepted> want;
    for (std::int64_t s = 0; s < 1 + repeat % 4; ++s) {
      trees.push_back(random_tree(random, 1 + random.below(80), false));
      want.push_back(reference(trees.back(), 80));
      longest = std::max(longest, want.back().path.size());
    }
    EXPECT_EQ(accept(trees, 80 + repeat % 5, 80), want);
  }
  EXPECT_GE(longest, 8U) << "the test walks too little";
}

TEST_P(AcceptTest, MalformedTreesAreBounded) {
  Random random(2);
  for (int repeat = 0; repeat < 300; ++repeat) {
    const ChosenTree tree = random_tree(random, 1 + random.below(40), true);
    EXPECT_EQ(accept({tree}, 40, 40), (std::vector<Accepted>{reference(tree, 40)}));
  }
  // Two nodes that are each other's child, and one that is its own.
  const ChosenTree cycle = {{1, 1, 1, 1}, {2, 0, 1, 3}, {1, 1, 1, 1}};
  EXPECT_EQ(accept({cycle}, 4, 4), (std::vector<Accepted>{{{0, 1, 2}, 1}}));
}

// A path longer than there is room for ends early, with the target's own choice behind it: still a
// correct one.
TEST_P(AcceptTest, PathsEndWhereTheRoomEnds) {
  ChosenTree tree;
  for (std::int32_t node = 0; node < 10; ++node) {
    tree.token_ids.push_back(node);
    tree.parents.push_back(node - 1);
    tree.choices.push_back(node + 1);
  }
  EXPECT_EQ(accept({tree}, 10, 4), (std::vector<Accepted>{{{0, 1, 2, 3}, 4}}));
}

TEST_P(AcceptTest, EqualChildrenTheLowestWins) {
  const ChosenTree tree = {{0, 5, 5, 6, 6}, {-1, 0, 0, 2, 1}, {5, 6, 6, 1, 2}};
  EXPECT_EQ(accept({tree}, 5, 5), (std::vector<Accepted>{{{0, 1, 4}, 2}}));
}

TEST_P(AcceptTest, MalformedShapesThrow) {
  GuardedTensor num_nodes(backend(), DType::kInt32, {2});
  GuardedTensor nodes(backend(), DType::kInt32, {2, 4});
  GuardedTensor choices(backend(), DType::kInt32, {8});
  GuardedTensor offsets(backend(), DType::kInt32, {2});  // one too few
  GuardedTensor lengths(backend(), DType::kInt32, {2});
  GuardedTensor paths(backend(), DType::kInt32, {2, 4});
  GuardedTensor bonus(backend(), DType::kInt32, {2});
  EXPECT_THROW(backend().accept({{num_nodes.view(), nodes.view(), nodes.view(), nodes.view()},
                                 choices.view(),
                                 offsets.view(),
                                 lengths.view(),
                                 paths.view(),
                                 bonus.view()}),
               Error);
}

}  // namespace
}  // namespace kdtree::ops_test
