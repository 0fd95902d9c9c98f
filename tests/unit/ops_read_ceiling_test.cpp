// sum_words and what a backend says of its device.
#include "tests/unit/op_test.h"

namespace kdtree::ops_test {
namespace {

class SumWordsTest : public OpTest {
 protected:
  std::int32_t sum(ConstTensorView words) {
    GuardedTensor result(backend(), DType::kInt32, {1});
    backend().sum_words(words, result.view());
    return result.download<std::int32_t>()[0];
  }
};
KDTREE_TEST_ALL_BACKENDS(SumWordsTest);

std::int32_t host_sum(const std::vector<std::int32_t>& words, std::int64_t first) {
  std::uint32_t total = 0;
  for (std::size_t i = static_cast<std::size_t>(first); i < words.size(); ++i) {
    total += static_cast<std::uint32_t>(words[i]);
  }
  return static_cast<std::int32_t>(total);
}

// Every alignment of the first word, and sizes on both sides of a vector, a block and a thread's
// loads.
TEST_P(SumWordsTest, EqualsASumModulo32Bits) {
  Random random(1);
  for (const std::int64_t count : {0, 1, 3, 4, 5, 8, 511, 2048, 2053, 1 << 16, 3000001}) {
    std::vector<std::int32_t> words;
    for (std::int64_t i = 0; i < count; ++i) {
      words.push_back(static_cast<std::int32_t>(random.below(std::int64_t{1} << 32)));
    }
    auto tensor = make_indices(backend(), words);
    for (std::int64_t skip = 0; skip < std::min<std::int64_t>(count + 1, 4); ++skip) {
      EXPECT_EQ(sum(tensor.view().rows(skip, count - skip)), host_sum(words, skip))
          << count << " words from " << skip;
    }
  }
}

TEST_P(SumWordsTest, MalformedShapesThrow) {
  GuardedTensor words(backend(), DType::kInt32, {8});
  GuardedTensor wide(backend(), DType::kInt64, {8});
  GuardedTensor one(backend(), DType::kInt32, {1});
  GuardedTensor two(backend(), DType::kInt32, {2});
  EXPECT_THROW(backend().sum_words(words.view(), two.view()), Error);
  EXPECT_THROW(backend().sum_words(wide.view(), one.view()), Error);
}

TEST_P(SumWordsTest, DeviceFactsAreThere) {
  const DeviceFacts facts = backend().device_facts();
  EXPECT_FALSE(facts.name.empty());
  EXPECT_FALSE(facts.architecture.empty());
  EXPECT_GT(facts.num_processors, 0);
  EXPECT_GT(facts.memory_bytes, 0);
  EXPECT_GE(facts.cache_bytes, 0);
}

}  // namespace
}  // namespace kdtree::ops_test
