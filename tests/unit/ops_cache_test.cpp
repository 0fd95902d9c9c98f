// cache_write and compact.
#include "tests/unit/op_batch.h"

namespace kdtree::ops_test {
namespace {

class CacheWriteTest : public OpTest {};
KDTREE_TEST_ALL_BACKENDS(CacheWriteTest);

TEST_P(CacheWriteTest, WritesBehindThePrefixAndNowhereElse) {
  Random random(1);
  const std::vector<HostSequence> sequences = {{.slot = 2, .prefix = 3, .parents = chain(4)},
                                               {.slot = 0, .prefix = 0, .parents = chain(1)},
                                               {.slot = 3, .prefix = 0, .parents = {}},
                                               {.slot = 1, .prefix = 6, .parents = chain(5)}};
  for (const std::int64_t width : {1, 8, 37}) {
    const auto before = activations(random, 44 * width);
    const auto rows = activations(random, 10 * width);
    auto cache = input({4, 11, width}, before);
    auto values = input({10, width}, rows, width + 7);
    const DeviceBatch batch(backend(), sequences, false);
    backend().cache_write({.values = values.view(), .cache = cache.view(), .batch = batch.view()});
    std::vector<float> want = before;
    std::int64_t row = 0;
    for (const HostSequence& sequence : sequences) {
      std::copy_n(rows.begin() + row * width, sequence.num_nodes() * width,
                  want.begin() + (sequence.slot * 11 + sequence.prefix) * width);
      row += sequence.num_nodes();
    }
    expect_same_bits(read_floats(cache), want, "cache_write");
  }
}

TEST_P(CacheWriteTest, AnyNumberOfRowsAndPrefix) {
  Random random(6);
  constexpr std::int64_t kWidth = 3;
  constexpr std::int64_t kCapacity = 8191 + kMostRows;
  const auto before = activations(random, 2 * kCapacity * kWidth);
  const auto values = activations(random, kMostRows * kWidth);
  for (const std::int64_t count : kRowCounts) {
    const std::vector<float> rows(values.begin(), values.begin() + count * kWidth);
    auto source = input({count, kWidth}, rows);
    for (const std::int32_t prefix : kPrefixLengths) {
      auto cache = input({2, kCapacity, kWidth}, before);
      const DeviceBatch batch(backend(), {{.slot = 1, .prefix = prefix, .parents = chain(count)}},
                              false);
      backend().cache_write(
          {.values = source.view(), .cache = cache.view(), .batch = batch.view()});
      std::vector<float> want = before;
      std::copy(rows.begin(), rows.end(), want.begin() + (kCapacity + prefix) * kWidth);
      expect_same_bits(read_floats(cache), want,
                       std::to_string(count) + " rows behind " + std::to_string(prefix));
    }
  }
}

TEST_P(CacheWriteTest, NoRowsAndMalformedShapes) {
  Random random(2);
  const auto before = activations(random, 40);
  auto cache = input({2, 5, 4}, before);
  auto nothing = input({0, 4}, {});
  const DeviceBatch none(backend(), {}, false);
  backend().cache_write({.values = nothing.view(), .cache = cache.view(), .batch = none.view()});
  expect_same_bits(read_floats(cache), before, "no rows");

  const DeviceBatch batch(backend(), {{.slot = 1, .prefix = 3, .parents = chain(2)}}, false);
  auto narrow = input({2, 3}, activations(random, 6));
  auto tall = input({3, 4}, activations(random, 12));
  EXPECT_THROW(backend().cache_write({narrow.view(), cache.view(), batch.view()}), Error);
  EXPECT_THROW(backend().cache_write({tall.view(), cache.view(), batch.view()}), Error);
  if (backend().name() == "cpu") {  // what needs the values of index tensors
    auto values = input({2, 4}, activations(random, 8));
    const DeviceBatch too_far(backend(), {{.slot = 1, .prefix = 4, .parents = chain(2)}}, false);
    EXPECT_THROW(backend().cache_write({values.view(), cache.view(), too_far.view()}), Error);
    const DeviceBatch no_slot(backend(), {{.slot = 2, .prefix = 0, .parents = chain(2)}}, false);
    EXPECT_THROW(backend().cache_write({values.view(), cache.view(), no_slot.view()}), Error);
  }
  expect_same_bits(read_floats(cache), before, "malformed calls");
}

class CompactTest : public OpTest {
 protected:
  struct Sequence {
    std::int32_t slot = 0;
    std::int32_t prefix = 0;
    std::vector<std::int32_t> path;
  };

  static constexpr std::int64_t kSlots = 4;
  static constexpr std::int64_t kCapacity = 100;
  static constexpr std::int64_t kMaxPath = 20;

  void compact(GuardedTensor& cache, const std::vector<Sequence>& sequences,
               std::int64_t max_path = kMaxPath) {
    std::vector<std::int32_t> slots;
    std::vector<std::int32_t> prefixes;
    std::vector<std::int32_t> lengths;
    std::vector<std::int32_t> padded;
    for (const Sequence& sequence : sequences) {
      slots.push_back(sequence.slot);
      prefixes.push_back(sequence.prefix);
      lengths.push_back(static_cast<std::int32_t>(sequence.path.size()));
      padded.insert(padded.end(), sequence.path.begin(), sequence.path.end());
      padded.resize(slots.size() * static_cast<std::size_t>(max_path),
                    -7);  // behind a path may stand anything
    }
    auto slot = make_indices(backend(), slots);
    auto prefix = make_indices(backend(), prefixes);
    auto length = make_indices(backend(), lengths);
    auto paths =
        make_tensor(backend(), {static_cast<std::int64_t>(slots.size()), max_path}, padded);
    backend().compact({.cache = cache.view(),
                       .slots = slot.view(),
                       .prefix_lengths = prefix.view(),
                       .path_lengths = length.view(),
                       .paths = paths.view()});
  }

  // Strictly ascending, path[0] = 0, path[i] below num_nodes.
  static std::vector<std::int32_t> random_path(Random& random, std::int32_t num_nodes) {
    std::vector<std::int32_t> path = {0};
    while (static_cast<std::int64_t>(path.size()) < kMaxPath) {
      const auto next =
          path.back() + 1 + static_cast<std::int32_t>(random.below(random.below(2) == 0 ? 1 : 8));
      if (next >= num_nodes) {
        break;
      }
      path.push_back(next);
    }
    return path;
  }
};
KDTREE_TEST_ALL_BACKENDS(CompactTest);

TEST_P(CompactTest, EqualsACopyThroughOtherMemory) {
  Random random(3);
  for (int repeat = 0; repeat < 40; ++repeat) {
    const std::int64_t width = 1 + random.below(40);
    const auto before = activations(random, kSlots * kCapacity * width);
    auto cache = input({kSlots, kCapacity, width}, before);
    std::vector<Sequence> sequences;
    const auto slots = random.permutation(kSlots);
    for (std::int64_t s = 0; s < 1 + repeat % kSlots; ++s) {
      const auto prefix = static_cast<std::int32_t>(random.below(36));
      sequences.push_back({slots[static_cast<std::size_t>(s)], prefix, random_path(random, 64)});
    }
    compact(cache, sequences);
    std::vector<float> want = before;
    for (const Sequence& sequence : sequences) {
      const std::int64_t first = (sequence.slot * kCapacity + sequence.prefix) * width;
      for (std::size_t i = 0; i < sequence.path.size(); ++i) {
        std::copy_n(before.begin() + first + sequence.path[i] * width, width,
                    want.begin() + first + static_cast<std::int64_t>(i) * width);
      }
    }
    expect_same_bits(read_floats(cache), want, "compact");
  }
}

// Every second node of long trees.
TEST_P(CompactTest, LongPaths) {
  Random random(7);
  constexpr std::int64_t kWidth = 3;
  constexpr std::int64_t kRows = 8191 + 2 * kMostRows;
  const auto before = activations(random, 2 * kRows * kWidth);
  for (const std::int64_t length : kRowCounts) {
    Sequence sequence = {.slot = 1, .prefix = 0, .path = {}};
    for (std::int32_t i = 0; i < length; ++i) {
      sequence.path.push_back(2 * i);
    }
    for (const std::int32_t prefix : kPrefixLengths) {
      sequence.prefix = prefix;
      auto cache = input({2, kRows, kWidth}, before);
      compact(cache, {sequence}, kMostRows);
      std::vector<float> want = before;
      const std::int64_t first = kRows + prefix;
      for (std::int64_t i = 0; i < length; ++i) {
        std::copy_n(before.begin() + (first + 2 * i) * kWidth, kWidth,
                    want.begin() + (first + i) * kWidth);
      }
      expect_same_bits(read_floats(cache), want, "a path of " + std::to_string(length));
    }
  }
}

TEST_P(CompactTest, PathsThatMoveNothing) {
  Random random(4);
  const auto before = activations(random, kSlots * kCapacity * 5);
  auto cache = input({kSlots, kCapacity, 5}, before);
  compact(cache, {});
  compact(cache, {{0, 3, {}}, {1, 99, {0}}, {2, 0, {0, 1, 2, 3}}});
  expect_same_bits(read_floats(cache), before, "compact");
}

TEST_P(CompactTest, MalformedPathsThrow) {
  if (backend().name() != "cpu") {
    GTEST_SKIP() << "paths are values on the device";
  }
  Random random(5);
  const auto before = activations(random, kSlots * kCapacity * 2);
  auto cache = input({kSlots, kCapacity, 2}, before);
  EXPECT_THROW(compact(cache, {{0, 0, {0, 2, 2}}}), Error);
  EXPECT_THROW(compact(cache, {{0, 0, {0, 3, 2}}}), Error);
  EXPECT_THROW(compact(cache, {{0, 0, {-1, 0}}}), Error);
  EXPECT_THROW(compact(cache, {{0, 90, {0, 10}}}), Error);
  EXPECT_THROW(compact(cache, {{0, -1, {0}}}), Error);
  EXPECT_THROW(compact(cache, {{4, 0, {0}}}), Error);
  // A sound sequence before the broken one must not have been moved.
  EXPECT_THROW(compact(cache, {{1, 0, {0, 5}}, {0, 0, {0, 100}}}), Error);
  expect_same_bits(read_floats(cache), before, "malformed calls");
}

}  // namespace
}  // namespace kdtree::ops_test
