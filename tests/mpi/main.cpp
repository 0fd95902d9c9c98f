// Runs the tests on all ranks of an MPI job. Rank 0 prints; the other ranks print their failures.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "comm/mpi/mpi_process_group.h"
#include "core/log.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

std::string environment_or(const char* variable, const char* otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr ? otherwise : value;
}

World* the_world = nullptr;

// At once rather than at the end: a rank that fails often leaves the others in a collective that
// never ends.
class RankFailures final : public testing::EmptyTestEventListener {
 public:
  // Remembered: asking gtest for it from within a failure waits for gtest's own lock.
  void OnTestStart(const testing::TestInfo& test) override {
    test_ = fmt::format("{}.{}", test.test_suite_name(), test.name());
  }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed()) {
      fmt::print(stderr, "rank {}: {}: {}:{}: {}\n", world().rank(), test_,
                 result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(),
                 result.message());
      std::fflush(stderr);
    }
  }

 private:
  std::string test_;
};

// Whether a test failed on any rank; the same on all. Rank 0 names those that others failed.
bool any_rank_failed(ProcessGroup& group, bool failed) {
  const auto size = static_cast<std::size_t>(group.world_size());
  const std::int32_t own = failed ? 1 : 0;
  std::vector<std::int32_t> all(size);
  group.all_gather(&own, sizeof own, all.data());
  for (std::size_t rank = 1; rank < size && group.rank() == 0; ++rank) {
    if (all[rank] != 0) {
      fmt::print(stderr, "tests failed on rank {}\n", rank);
    }
  }
  return std::any_of(all.begin(), all.end(), [](std::int32_t value) { return value != 0; });
}

int run(ProcessGroup& group) {
  init_logging("warn", group.rank(), group.world_size());
  // The same tests on GPUs: KDTREE_TEST_BACKEND=cuda, with float32 activations.
  const std::unique_ptr<Backend> backend =
      make_backend({.name = environment_or("KDTREE_TEST_BACKEND", "cpu"),
                    .num_threads = 1,
                    .local_rank = group.local_rank()});
  const std::unique_ptr<Communicator> communicator = make_communicator(
      {.name = environment_or("KDTREE_TEST_COMMUNICATOR", "auto"), .backend = backend->name()},
      group);
  World world{.group = group, .communicator = *communicator, .backend = *backend};
  the_world = &world;
  if (group.rank() != 0) {
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new RankFailures);
  }
  const bool failed = RUN_ALL_TESTS() != 0;
  const bool empty = testing::UnitTest::GetInstance()->test_to_run_count() == 0;
  return any_rank_failed(group, failed || empty) ? 1 : 0;
}

}  // namespace

World& world() {
  return *the_world;
}

}  // namespace kdtree

int main(int argc, char** argv) {
  // A test that left a rank behind ends here rather than at CTest's limit.
  setenv("KDTREE_COLLECTIVE_TIMEOUT_S", "60", /*overwrite=*/0);
  testing::InitGoogleTest(&argc, argv);
  if (testing::GTEST_FLAG(list_tests)) {
    return RUN_ALL_TESTS();
  }
  const std::unique_ptr<kdtree::ProcessGroup> group = kdtree::make_mpi_process_group(&argc, &argv);
  try {
    return kdtree::run(*group);
  } catch (const std::exception& error) {
    fmt::print(stderr, "rank {}: {}\n", group->rank(), error.what());
    group->abort(1);
  }
}
