// The ops of speculation: trees built and expanded, paths accepted, caches compacted.
#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include "study/bench_data.h"
#include "study/kernel_bench_cases.h"

namespace kdtree {

namespace {

constexpr std::int64_t kBitsPerWord = 64;
// Of the published drafters: blocks of 8 tokens, the first of which is the root.
constexpr std::int64_t kDraftHorizon = 7;
constexpr std::int64_t kBudgets[] = {16, 64, 128};
constexpr std::int64_t kSequences[] = {1, 16};
constexpr std::int64_t kPrefix = 1000;

struct HostTree {
  std::vector<std::int32_t> token_ids;
  std::vector<std::int32_t> parents;
  std::vector<std::int32_t> depths;
};

// A drafter's candidates: [sequences * horizon, k], descending, K = the budget.
struct Draft {
  std::int64_t sequences = 0;
  std::int64_t budget = 0;
  std::int64_t k = 0;
  std::vector<float> log_probs;
  std::vector<std::int32_t> candidates;
  std::vector<std::int32_t> roots;
};

Draft make_draft(const BenchContext& context, std::int64_t sequences, std::int64_t budget) {
  BenchRandom random(context.seed("draft"));
  Draft draft;
  draft.sequences = sequences;
  draft.budget = budget;
  draft.k = std::min(budget, context.config.vocab_size);
  for (std::int64_t slot = 0; slot < sequences * kDraftHorizon; ++slot) {
    // Log-probabilities fall roughly linearly with the rank, and uncertainty grows with the depth.
    float log_prob =
        static_cast<float>(-random.uniform(0, 0.2 * static_cast<double>(slot % kDraftHorizon + 1)));
    const std::int64_t first = random.below(context.config.vocab_size);
    for (std::int64_t rank = 0; rank < draft.k; ++rank) {
      draft.log_probs.push_back(log_prob);
      draft.candidates.push_back(
          static_cast<std::int32_t>((first + rank) % context.config.vocab_size));
      log_prob -= static_cast<float>(random.uniform(0, 0.5));
    }
  }
  for (std::int64_t s = 0; s < sequences; ++s) {
    draft.roots.push_back(static_cast<std::int32_t>(random.below(context.config.vocab_size)));
  }
  return draft;
}

// The most probable prefixes by a heap over (log-weight, rank tuple), in float64.
HostTree best_first(const Draft& draft, std::int64_t sequence) {
  struct Prefix {
    double negative_log_weight = 0;
    std::vector<std::int32_t> ranks;
    double parent_log_weight = 0;
    std::int32_t parent = 0;
  };
  const auto later = [](const Prefix& a, const Prefix& b) {
    return std::tie(a.negative_log_weight, a.ranks) > std::tie(b.negative_log_weight, b.ranks);
  };
  std::vector<Prefix> heap;
  const auto place_of = [&](std::size_t depth, std::int32_t rank) {
    return static_cast<std::size_t>(
        (sequence * kDraftHorizon + static_cast<std::int64_t>(depth)) * draft.k + rank);
  };
  const auto push = [&](Prefix prefix) {
    if (prefix.ranks.size() > static_cast<std::size_t>(kDraftHorizon) ||
        prefix.ranks.back() >= draft.k) {
      return;
    }
    const std::size_t place = place_of(prefix.ranks.size() - 1, prefix.ranks.back());
    prefix.negative_log_weight =
        -(prefix.parent_log_weight + static_cast<double>(draft.log_probs[place]));
    heap.push_back(std::move(prefix));
    std::push_heap(heap.begin(), heap.end(), later);
  };
  HostTree tree{.token_ids = {draft.roots[static_cast<std::size_t>(sequence)]},
                .parents = {-1},
                .depths = {0}};
  push({.ranks = {0}});
  while (static_cast<std::int64_t>(tree.parents.size()) <= draft.budget && !heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const Prefix taken = std::move(heap.back());
    heap.pop_back();
    const auto node = static_cast<std::int32_t>(tree.parents.size());
    tree.parents.push_back(taken.parent);
    tree.depths.push_back(static_cast<std::int32_t>(taken.ranks.size()));
    tree.token_ids.push_back(
        draft.candidates[place_of(taken.ranks.size() - 1, taken.ranks.back())]);
    Prefix sibling = taken;
    ++sibling.ranks.back();
    push(std::move(sibling));
    Prefix child{.ranks = taken.ranks, .parent_log_weight = -taken.negative_log_weight};
    child.ranks.push_back(0);
    child.parent = node;
    push(std::move(child));
  }
  return tree;
}

// Device tensors of one number of sequences and one budget; every op reads what the one before it
// wrote.
struct TreeTensors {
  TreeTensors(Backend& backend, const Draft& draft)
      : sequences(draft.sequences),
        max_nodes(draft.budget + 1),
        words((max_nodes + kBitsPerWord - 1) / kBitsPerWord),
        log_probs(upload_floats(backend, DType::kFloat32, Shape{sequences * kDraftHorizon, draft.k},
                                draft.log_probs)),
        candidates(
            upload_indices(backend, Shape{sequences * kDraftHorizon, draft.k}, draft.candidates)),
        roots(upload_indices(backend, Shape{sequences}, draft.roots)),
        num_nodes(backend, DType::kInt32, Shape{sequences}),
        token_ids(backend, DType::kInt32, Shape{sequences, max_nodes}),
        parents(backend, DType::kInt32, Shape{sequences, max_nodes}),
        depths(backend, DType::kInt32, Shape{sequences, max_nodes}) {}

  TreeArrays arrays() const {
    return {.num_nodes = num_nodes.view(),
            .token_ids = token_ids.view(),
            .parents = parents.view(),
            .depths = depths.view()};
  }
  std::int64_t rows() const { return sequences * max_nodes; }
  std::int64_t tree_bytes() const { return num_nodes.bytes() + 3 * token_ids.bytes(); }

  std::int64_t sequences;
  std::int64_t max_nodes;
  std::int64_t words;
  DeviceTensor log_probs;
  DeviceTensor candidates;
  DeviceTensor roots;
  DeviceTensor num_nodes;
  DeviceTensor token_ids;
  DeviceTensor parents;
  DeviceTensor depths;
};

nlohmann::ordered_json tree_json(const Draft& draft) {
  return {{"sequences", draft.sequences}, {"tree_budget", draft.budget}};
}

void bench_build(const BenchContext& context, const Draft& draft, const TreeTensors& tensors,
                 const std::vector<HostTree>& trees) {
  Backend& backend = context.backend;
  nlohmann::ordered_json shape = tree_json(draft);
  shape["draft_horizon"] = kDraftHorizon;
  shape["candidates"] = draft.k;
  context.measure({.kernel = "build_trees",
                   .shape = shape,
                   .rows = tensors.rows(),
                   .activation_bytes = tensors.log_probs.bytes() + tensors.candidates.bytes() +
                                       tensors.roots.bytes() + tensors.tree_bytes(),
                   .run =
                       [&](std::int64_t) {
                         backend.build_trees({.log_probs = tensors.log_probs.view(),
                                              .candidates = tensors.candidates.view(),
                                              .draft_horizon = kDraftHorizon,
                                              .roots = tensors.roots.view(),
                                              .tree_budget = draft.budget,
                                              .trees = tensors.arrays()});
                       },
                   .check =
                       [&] {
                         const auto nodes = download_indices(backend, tensors.num_nodes.view());
                         const auto tokens = download_indices(backend, tensors.token_ids.view());
                         const auto parents = download_indices(backend, tensors.parents.view());
                         const auto depths = download_indices(backend, tensors.depths.view());
                         ResultCheck check;
                         for (std::size_t s = 0; s < trees.size(); ++s) {
                           const HostTree& want = trees[s];
                           check.equal(nodes[s], static_cast<std::int64_t>(want.parents.size()),
                                       "nodes of tree", static_cast<std::int64_t>(s));
                           for (std::size_t n = 0; n < want.parents.size(); ++n) {
                             const std::size_t place =
                                 s * static_cast<std::size_t>(tensors.max_nodes) + n;
                             const auto index = static_cast<std::int64_t>(place);
                             check.equal(tokens[place], want.token_ids[n], "token of node", index);
                             check.equal(parents[place], want.parents[n], "parent of node", index);
                             check.equal(depths[place], want.depths[n], "depth of node", index);
                           }
                         }
                         return check;
                       }});
}

void bench_expand(const BenchContext& context, const Draft& draft, const TreeTensors& tensors,
                  const std::vector<HostTree>& trees) {
  Backend& backend = context.backend;
  const std::int64_t rows = tensors.rows();
  const std::vector<std::int32_t> prefixes(static_cast<std::size_t>(tensors.sequences), kPrefix);
  const DeviceTensor prefix_lengths = upload_indices(backend, Shape{tensors.sequences}, prefixes);
  const DeviceTensor tokens(backend, DType::kInt32, Shape{rows});
  const DeviceTensor positions(backend, DType::kInt32, Shape{rows});
  const DeviceTensor mask(backend, DType::kInt64, Shape{rows, tensors.words});
  context.measure(
      {.kernel = "expand_trees",
       .shape = tree_json(draft),
       .rows = rows,
       .activation_bytes = tensors.tree_bytes() + tokens.bytes() + positions.bytes() + mask.bytes(),
       .run =
           [&](std::int64_t) {
             backend.expand_trees({.trees = tensors.arrays(),
                                   .prefix_lengths = prefix_lengths.view(),
                                   .token_ids = tokens.view(),
                                   .positions = positions.view(),
                                   .ancestor_mask = mask.view()});
           },
       .check =
           [&] {
             const auto got_tokens = download_indices(backend, tokens.view());
             const auto got_positions = download_indices(backend, positions.view());
             std::vector<std::int64_t> got_mask(static_cast<std::size_t>(rows * tensors.words));
             mask.download(backend, std::span(got_mask));
             backend.synchronize();
             ResultCheck check;
             for (std::int64_t row = 0; row < rows; ++row) {
               const HostTree& tree = trees[static_cast<std::size_t>(row / tensors.max_nodes)];
               const auto node = static_cast<std::size_t>(row % tensors.max_nodes);
               const bool inside = node < tree.parents.size();
               const auto at = static_cast<std::size_t>(row);
               check.equal(got_tokens[at], inside ? tree.token_ids[node] : 0, "token of row", row);
               check.equal(got_positions[at], kPrefix + (inside ? tree.depths[node] : 0),
                           "position of row", row);
               std::vector<std::uint64_t> want(static_cast<std::size_t>(tensors.words));
               want[node / kBitsPerWord] |= std::uint64_t{1} << (node % kBitsPerWord);
               for (std::int32_t n = inside ? tree.parents[node] : -1; n >= 0;
                    n = tree.parents[static_cast<std::size_t>(n)]) {
                 want[static_cast<std::size_t>(n / kBitsPerWord)] |= std::uint64_t{1}
                                                                     << (n % kBitsPerWord);
               }
               for (std::size_t word = 0; word < want.size(); ++word) {
                 check.equal(got_mask[at * want.size() + word],
                             static_cast<std::int64_t>(want[word]), "mask of row", row);
               }
             }
             return check;
           }});
}

// The target's choice at every node: that of its first child, or token 0 at a leaf. The path then
// goes down first children, as far as they go.
std::vector<std::int32_t> first_child_choices(const HostTree& tree, std::int64_t max_nodes) {
  std::vector<std::int32_t> choices(static_cast<std::size_t>(max_nodes));
  for (std::size_t node = tree.parents.size(); node-- > 1;) {
    choices[static_cast<std::size_t>(tree.parents[node])] = tree.token_ids[node];
  }
  return choices;
}

void bench_accept(const BenchContext& context, const Draft& draft, const TreeTensors& tensors,
                  const std::vector<HostTree>& trees) {
  Backend& backend = context.backend;
  constexpr std::int64_t kMaxPath = kDraftHorizon + 1;
  std::vector<std::int32_t> choices;
  std::vector<std::int32_t> offsets = {0};
  for (const HostTree& tree : trees) {
    const auto own = first_child_choices(tree, tensors.max_nodes);
    choices.insert(choices.end(), own.begin(), own.end());
    offsets.push_back(static_cast<std::int32_t>(choices.size()));
  }
  const DeviceTensor device_choices = upload_indices(backend, Shape{tensors.rows()}, choices);
  const DeviceTensor row_offsets = upload_indices(backend, Shape{tensors.sequences + 1}, offsets);
  const DeviceTensor lengths(backend, DType::kInt32, Shape{tensors.sequences});
  const DeviceTensor paths(backend, DType::kInt32, Shape{tensors.sequences, kMaxPath});
  const DeviceTensor bonus(backend, DType::kInt32, Shape{tensors.sequences});
  context.measure(
      {.kernel = "accept",
       .shape = tree_json(draft),
       .rows = tensors.rows(),
       .activation_bytes = tensors.tree_bytes() + device_choices.bytes() + row_offsets.bytes() +
                           lengths.bytes() + paths.bytes() + bonus.bytes(),
       .run =
           [&](std::int64_t) {
             backend.accept({.trees = tensors.arrays(),
                             .choices = device_choices.view(),
                             .row_offsets = row_offsets.view(),
                             .path_lengths = lengths.view(),
                             .paths = paths.view(),
                             .bonus_tokens = bonus.view()});
           },
       .check =
           [&] {
             const auto got_lengths = download_indices(backend, lengths.view());
             const auto got_paths = download_indices(backend, paths.view());
             const auto got_bonus = download_indices(backend, bonus.view());
             ResultCheck check;
             for (std::size_t s = 0; s < trees.size(); ++s) {
               const HostTree& tree = trees[s];
               const auto sequence = static_cast<std::int64_t>(s);
               const std::int32_t* choice = choices.data() + offsets[s];
               std::int32_t current = 0;
               std::int64_t length = 1;
               check.equal(got_paths[s * kMaxPath], 0, "root of path", sequence);
               for (std::size_t node = 1; node < tree.parents.size() && length < kMaxPath; ++node) {
                 if (tree.parents[node] == current && tree.token_ids[node] == choice[current]) {
                   current = static_cast<std::int32_t>(node);
                   check.equal(got_paths[s * kMaxPath + static_cast<std::size_t>(length++)],
                               current, "node of path", sequence);
                 }
               }
               check.equal(got_lengths[s], length, "length of path", sequence);
               check.equal(got_bonus[s], choice[current], "bonus token of sequence", sequence);
             }
             return check;
           }});
}

// The paths that bench_accept's choices would give, spread over the tree: node 2 i at place i.
void bench_compact_case(const BenchContext& context, std::int64_t sequences, std::int64_t budget) {
  Backend& backend = context.backend;
  const DType activation = context.activation();
  const std::int64_t width = context.mla_shape().latent_dim();
  constexpr std::int64_t kMaxPath = kDraftHorizon + 1;
  const std::int64_t capacity = kPrefix + budget + 1;
  const std::int64_t call_bytes = sequences * capacity * width * context.activation_size();
  const std::int64_t copies = std::min<std::int64_t>(context.num_copies("compact", call_bytes), 16);
  const LargeValues values{.seed = context.seed("compact"), .exponent = -7};
  const DeviceTensor cache(backend, activation, Shape{copies * sequences, capacity, width});
  fill_large(backend, values, cache.view());
  std::vector<std::int32_t> path(kMaxPath);
  for (std::int32_t place = 0; place < kMaxPath; ++place) {
    path[static_cast<std::size_t>(place)] = 2 * place;
  }
  std::vector<std::int32_t> paths;
  for (std::int64_t s = 0; s < sequences; ++s) {
    paths.insert(paths.end(), path.begin(), path.end());
  }
  const std::vector<std::int32_t> prefixes(static_cast<std::size_t>(sequences), kPrefix);
  const std::vector<std::int32_t> lengths(static_cast<std::size_t>(sequences), kMaxPath);
  const DeviceTensor device_paths = upload_indices(backend, Shape{sequences, kMaxPath}, paths);
  const DeviceTensor prefix_lengths = upload_indices(backend, Shape{sequences}, prefixes);
  const DeviceTensor path_lengths = upload_indices(backend, Shape{sequences}, lengths);
  std::vector<DeviceTensor> slots;
  for (std::int64_t copy = 0; copy < copies; ++copy) {
    std::vector<std::int32_t> own;
    for (std::int64_t s = 0; s < sequences; ++s) {
      own.push_back(static_cast<std::int32_t>(copy * sequences + s));
    }
    slots.push_back(upload_indices(backend, Shape{sequences}, own));
  }
  context.measure(
      {.kernel = "compact",
       .shape = {{"sequences", sequences},
                 {"tree_budget", budget},
                 {"path", kMaxPath},
                 {"width", width}},
       .rows = sequences * kMaxPath,
       .cache_bytes = 2 * sequences * kMaxPath * width * context.activation_size(),
       .activation_bytes = device_paths.bytes() + 3 * prefix_lengths.bytes(),
       .num_copies = copies,
       .run =
           [&](std::int64_t copy) {
             backend.compact({.cache = cache.view(),
                              .slots = slots[static_cast<std::size_t>(copy)].view(),
                              .prefix_lengths = prefix_lengths.view(),
                              .path_lengths = path_lengths.view(),
                              .paths = device_paths.view()});
           },
       .check =
           [&] {
             ResultCheck check;
             for (std::int64_t s = 0; s < sequences; ++s) {
               const std::vector<float> got = download_rows(backend, cache.view(), s, 1);
               for (std::int64_t row = kPrefix - 1; row < kPrefix + kMaxPath; ++row) {
                 const std::int64_t from =
                     row < kPrefix ? row : kPrefix + path[static_cast<std::size_t>(row - kPrefix)];
                 for (std::int64_t c = 0; c < width; ++c) {
                   check.within(got[static_cast<std::size_t>(row * width + c)],
                                values.at((s * capacity + from) * width + c), 0, "cache row", row);
                 }
               }
             }
             return check;
           }});
}

}  // namespace

void bench_trees(const BenchContext& context) {
  for (const std::int64_t budget : kBudgets) {
    for (const std::int64_t sequences : kSequences) {
      const Draft draft = make_draft(context, sequences, budget);
      std::vector<HostTree> trees;
      for (std::int64_t s = 0; s < sequences; ++s) {
        trees.push_back(best_first(draft, s));
      }
      const TreeTensors tensors(context.backend, draft);
      // The trees are there whether they are measured or not.
      context.backend.build_trees({.log_probs = tensors.log_probs.view(),
                                   .candidates = tensors.candidates.view(),
                                   .draft_horizon = kDraftHorizon,
                                   .roots = tensors.roots.view(),
                                   .tree_budget = draft.budget,
                                   .trees = tensors.arrays()});
      if (context.wants("build_trees")) {
        bench_build(context, draft, tensors, trees);
      }
      if (context.wants("expand_trees")) {
        bench_expand(context, draft, tensors, trees);
      }
      if (context.wants("accept")) {
        bench_accept(context, draft, tensors, trees);
      }
    }
  }
}

void bench_compact(const BenchContext& context) {
  for (const std::int64_t budget : kBudgets) {
    for (const std::int64_t sequences : kSequences) {
      bench_compact_case(context, sequences, budget);
    }
  }
}

}  // namespace kdtree
