#include "tests/unit/op_batch.h"
#include "tests/unit/op_softmax.h"

namespace kdtree::ops_test {
namespace {

constexpr std::int64_t kBlockSlots = 3;
constexpr std::int64_t kBlockCapacity = 90;
constexpr float kScale = 0.4F;

struct Heads {
  std::int64_t head_dim = 0;
  std::int64_t num_key_value_heads = 0;
  std::vector<std::int32_t> kv_head_of;

  std::int64_t num_heads() const { return static_cast<std::int64_t>(kv_head_of.size()); }
  std::int64_t query_width() const { return num_heads() * head_dim; }
  std::int64_t cache_width() const { return num_key_value_heads * head_dim; }
};

class BlockAttentionTest : public OpTest {
 protected:
  struct Data {
    std::int64_t capacity = kBlockCapacity;
    std::vector<float> query;
    std::vector<float> keys;  // [slots, capacity, key/value heads * head_dim]
    std::vector<float> values;
  };

  Data random_data(Random& random, const Heads& heads, std::int64_t rows,
                   std::int64_t capacity = kBlockCapacity) const {
    const std::int64_t cache = kBlockSlots * capacity * heads.cache_width();
    return {.capacity = capacity,
            .query = activations(random, rows * heads.query_width(), -2, 2),
            .keys = activations(random, cache),
            .values = activations(random, cache)};
  }

  std::vector<float> run(Backend& other, const Heads& heads,
                         const std::vector<HostSequence>& sequences, const Data& data) {
    const Shape cache{kBlockSlots, data.capacity, heads.cache_width()};
    auto keys = make_floats(other, activation(), cache, data.keys);
    auto values = make_floats(other, activation(), cache, data.values);
    return run_on(other, heads, sequences, data.query, {keys.view(), values.view()});
  }

  struct Caches {
    ConstTensorView keys;
    ConstTensorView values;
  };

  // Over caches that lie on the device.
  std::vector<float> run_on(Backend& other, const Heads& heads,
                            const std::vector<HostSequence>& sequences,
                            const std::vector<float>& queries, const Caches& caches) {
    const DeviceBatch batch(other, sequences, false);
    const std::int64_t rows = batch.view().num_rows;
    auto query = make_floats(other, activation(), {rows, heads.query_width()}, queries,
                             heads.query_width() + 8);
    auto kv_head_of = make_indices(other, heads.kv_head_of);
    GuardedTensor out(other, activation(), {rows, heads.query_width()}, heads.query_width() + 4);
    other.block_attention({.num_heads = heads.num_heads(),
                           .num_key_value_heads = heads.num_key_value_heads,
                           .head_dim = heads.head_dim,
                           .kv_head_of = kv_head_of.view(),
                           .softmax_scale = kScale,
                           .query = query.view(),
                           .key_cache = caches.keys,
                           .value_cache = caches.values,
                           .batch = batch.view(),
                           .output = out.view()});
    return read_floats(out);
  }

  Expected expect_attention(const Heads& heads, const std::vector<HostSequence>& sequences,
                            const Data& data) const {
    Expected want;
    std::int64_t row = 0;
    for (const HostSequence& sequence : sequences) {
      for (std::int64_t node = 0; node < sequence.num_nodes(); ++node, ++row) {
        add_row(heads, sequence, row, data, want);
      }
    }
    return want;
  }
  // Appends what row `row` of the query gives in a block of this sequence.
  void add_row(const Heads& heads, const HostSequence& sequence, std::int64_t row, const Data& data,
               Expected& want) const {
    for (std::int64_t h = 0; h < heads.num_heads(); ++h) {
      const auto at = [&](const std::vector<float>& cache) {
        return [&, h](std::int64_t j) {
          return cache.data() + (sequence.slot * data.capacity + j) * heads.cache_width() +
                 heads.kv_head_of[static_cast<std::size_t>(h)] * heads.head_dim;
        };
      };
      add_attention(
          {.num_keys = sequence.prefix + sequence.num_nodes(),
           .key_dim = heads.head_dim,
           .value_dim = heads.head_dim,
           .scale = kScale,
           .query = data.query.data() + row * heads.query_width() + h * heads.head_dim,
           .key = at(data.keys),
           .value = at(data.values)},
          [this](double value) { return store_error(value); }, want);
    }
  }
};
KDTREE_TEST_ALL_BACKENDS(BlockAttentionTest);

const Heads kHeads[] = {
    {.head_dim = 1, .num_key_value_heads = 1, .kv_head_of = {0}},
    {.head_dim = 9,
     .num_key_value_heads = 2,
     .kv_head_of = {0, 0, 0, 1, 1}},  // an uneven share of the heads
    {.head_dim = 16, .num_key_value_heads = 3, .kv_head_of = {2, 0, 1}},
    {.head_dim = 64, .num_key_value_heads = 1, .kv_head_of = {0, 0, 0, 0}},
};

TEST_P(BlockAttentionTest, MatchesDoublePrecision) {
  Random random(1);
  const std::vector<std::vector<HostSequence>> batches = {
      {{.slot = 1, .prefix = 0, .parents = chain(1)}},
      {{.slot = 0, .prefix = 13, .parents = chain(8)}},
      {{.slot = 2, .prefix = 0, .parents = chain(7)},
       {.slot = 0, .prefix = 74, .parents = chain(16)},
       {.slot = 1, .prefix = 1, .parents = chain(2)}},
  };
  for (const Heads& heads : kHeads) {
    for (const auto& sequences : batches) {
      std::int64_t rows = 0;
      for (const HostSequence& sequence : sequences) {
        rows += sequence.num_nodes();
      }
      const Data data = random_data(random, heads, rows);
      expect_within(run(backend(), heads, sequences, data),
                    expect_attention(heads, sequences, data), "block_attention");
    }
  }
}

TEST_P(BlockAttentionTest, NoRowsAndNoHeads) {
  Random random(2);
  EXPECT_TRUE(run(backend(), kHeads[1], {}, random_data(random, kHeads[1], 0)).empty());
  const Heads none = {.head_dim = 8, .num_key_value_heads = 1, .kv_head_of = {}};
  const std::vector<HostSequence> sequences = {{.slot = 0, .prefix = 3, .parents = chain(4)}};
  EXPECT_TRUE(run(backend(), none, sequences, random_data(random, none, 4)).empty());
}

// Rows beyond the block are not read, those of the block are, in both directions.
TEST_P(BlockAttentionTest, SeesTheWholeBlockAndNoMore) {
  Random random(3);
  const Heads& heads = kHeads[2];
  const std::vector<HostSequence> sequences = {{.slot = 1, .prefix = 5, .parents = chain(4)}};
  Data data = random_data(random, heads, 4);
  const auto want = run(backend(), heads, sequences, data);
  for (std::int64_t slot = 0; slot < kBlockSlots; ++slot) {
    for (std::int64_t k = 0; k < kBlockCapacity; ++k) {
      if (slot != 1 || k >= 9) {
        const std::int64_t first = (slot * kBlockCapacity + k) * heads.cache_width();
        std::fill_n(data.keys.begin() + first, heads.cache_width(), NAN);
        std::fill_n(data.values.begin() + first, heads.cache_width(), NAN);
      }
    }
  }
  expect_same_bits(run(backend(), heads, sequences, data), want, "NaN beyond the block");
  data.values[static_cast<std::size_t>((kBlockCapacity + 8) * heads.cache_width())] =
      NAN;  // the block's last row
  const auto got = run(backend(), heads, sequences, data);
  EXPECT_TRUE(std::isnan(
      got[static_cast<std::size_t>(heads.head_dim)]));  // first row, the head that reads head 0
}

TEST_P(BlockAttentionTest, SequencesAreIndependent) {
  Random random(4);
  constexpr std::int64_t kNodes = 16;
  const Heads heads = {
      .head_dim = 37, .num_key_value_heads = 3, .kv_head_of = {0, 0, 0, 1, 1, 1, 2, 2, 2}};
  std::vector<HostSequence> sequences;
  sequences.reserve(kBlockSlots);
  for (std::int32_t s = 0; s < kBlockSlots; ++s) {
    sequences.push_back({.slot = 2 - s, .prefix = 30 * s + 5, .parents = chain(kNodes)});
  }
  const Data data = random_data(random, heads, kBlockSlots * kNodes);
  expect_row_independence<float>(
      kBlockSlots, [&](Backend& other, const std::vector<std::int64_t>& chosen) {
        Data part = data;
        part.query = choose_rows(data.query, chosen, kNodes * heads.query_width());
        return run(other, heads, choose_rows(sequences, chosen, 1), part);
      });
}

// Blocks of every size behind some prefixes, and some sizes behind every prefix. Between other
// sequences a block has the same bits.
TEST_P(BlockAttentionTest, EveryBlockAndPrefix) {
  Random random(6);
  constexpr std::int64_t kLongCapacity = 8191 + kMostRows;
  std::vector<std::pair<std::int64_t, std::int32_t>> sizes = {{kMostRows, 8191}};
  for (const std::int64_t rows : kRowCounts) {
    sizes.insert(sizes.end(), {{rows, 0}, {rows, 33}});
  }
  for (const std::int32_t prefix : kPrefixLengths) {
    sizes.insert(sizes.end(), {{1, prefix}, {8, prefix}, {17, prefix}});
  }
  for (const Heads& heads :
       {Heads{.head_dim = 16, .num_key_value_heads = 2, .kv_head_of = {0, 0, 1}},
        Heads{.head_dim = 128, .num_key_value_heads = 1, .kv_head_of = {0, 0}}}) {
    const Data data = random_data(random, heads, kMostRows, kLongCapacity);
    const Shape cache{kBlockSlots, kLongCapacity, heads.cache_width()};
    auto keys = make_floats(backend(), activation(), cache, data.keys);
    auto values = make_floats(backend(), activation(), cache, data.values);
    const Caches caches = {keys.view(), values.view()};
    for (const auto& [rows, prefix] : sizes) {
      const HostSequence sequence = {.slot = 2, .prefix = prefix, .parents = chain(rows)};
      const std::string name = std::to_string(heads.head_dim) + " wide, " + std::to_string(rows) +
                               " rows behind " + std::to_string(prefix);
      const std::vector<float> queries(data.query.begin(),
                                       data.query.begin() + rows * heads.query_width());
      const auto got = run_on(backend(), heads, {sequence}, queries, caches);
      const std::vector<std::int64_t> sampled = {0, rows / 2, rows - 1};
      Expected want;
      for (const std::int64_t row : sampled) {
        add_row(heads, sequence, row, data, want);
      }
      expect_within(choose_rows(got, sampled, heads.query_width()), want, name);
      if (rows > 65) {
        continue;
      }
      std::vector<float> more(data.query.begin(), data.query.begin() + 3 * heads.query_width());
      more.insert(more.end(), queries.begin(), queries.end());
      more.insert(more.end(), data.query.begin(), data.query.begin() + 9 * heads.query_width());
      const auto among = run_on(once(), heads,
                                {{.slot = 0, .prefix = 70, .parents = chain(3)},
                                 sequence,
                                 {.slot = 1, .prefix = 0, .parents = chain(9)}},
                                more, caches);
      expect_same_bits(std::vector<float>(among.begin() + 3 * heads.query_width(),
                                          among.begin() + (3 + rows) * heads.query_width()),
                       got, name + ", between others");
    }
  }
}

// As for tree_attention: what another call has left in scratch memory is not read.
TEST_P(BlockAttentionTest, ScratchOfAnotherCall) {
  Random random(7);
  const Heads& heads = kHeads[1];
  Data data = random_data(random, heads, 16);
  Data nan = data;
  nan.query.assign(nan.query.size(), NAN);
  const auto left = run(once(), heads, {{.slot = 0, .prefix = 74, .parents = chain(16)}}, nan);
  EXPECT_TRUE(std::isnan(left.front()) && std::isnan(left.back()));
  const std::vector<HostSequence> sequences = {{.slot = 1, .prefix = 3, .parents = chain(7)}};
  data.query.resize(static_cast<std::size_t>(7 * heads.query_width()));
  const auto fresh = make_test_backend(GetParam(), 1);
  expect_same_bits(run(once(), heads, sequences, data), run(*fresh, heads, sequences, data),
                   "after NaN");
}

TEST_P(BlockAttentionTest, MalformedShapesThrow) {
  Random random(5);
  const DeviceBatch batch(backend(), {{.slot = 0, .prefix = 0, .parents = chain(2)}}, false);
  auto query = input({2, 8}, activations(random, 16));
  auto keys = input({1, 2, 4}, activations(random, 8));
  auto values = input({1, 2, 4}, activations(random, 8));
  auto kv_head_of = make_indices(backend(), {0, 0});
  auto out = output({2, 8});
  BlockAttentionParams params = {.num_heads = 2,
                                 .num_key_value_heads = 1,
                                 .head_dim = 4,
                                 .kv_head_of = kv_head_of.view(),
                                 .softmax_scale = 1,
                                 .query = query.view(),
                                 .key_cache = keys.view(),
                                 .value_cache = values.view(),
                                 .batch = batch.view(),
                                 .output = out.view()};
  backend().block_attention(params);
  auto other_values = input({1, 3, 4}, activations(random, 12));
  params.value_cache = other_values.view();
  EXPECT_THROW(backend().block_attention(params), Error);
  params.value_cache = values.view();
  params.num_heads = 1;
  EXPECT_THROW(backend().block_attention(params), Error);
}

}  // namespace
}  // namespace kdtree::ops_test
