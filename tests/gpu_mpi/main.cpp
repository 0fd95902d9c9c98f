// Runs the tests of the GPU communicators on all ranks of an MPI job. Every rank prints its
// failures.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <vector>

#include "comm/mpi/mpi_process_group.h"
#include "core/log.h"
#include "tests/gpu_mpi/gpu_world.h"

namespace kdtree {

namespace {

GpuWorld* the_world = nullptr;

// At once rather than at the end, with the rank: the others may be stuck in a collective.
class RankFailures final : public testing::EmptyTestEventListener {
 public:
  explicit RankFailures(int rank) : rank_(rank) {}
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed()) {
      fmt::print(stderr, "rank {}: {}:{}: {}\n", rank_,
                 result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(),
                 result.message());
      std::fflush(stderr);
    }
  }

 private:
  int rank_;
};

int run(ProcessGroup& group) {
  init_logging("info", group.rank(), group.world_size());
  GpuWorld world(group);
  the_world = &world;
  if (const char* mode = std::getenv("KDTREE_TEST_LOST_RANK"); mode != nullptr) {
    return run_lost_rank(mode, world);
  }
  if (group.rank() != 0) {
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new RankFailures(group.rank()));
  }
  const std::int32_t failed = RUN_ALL_TESTS() == 0 ? 0 : 1;
  world.release();
  std::vector<std::int32_t> all(static_cast<std::size_t>(group.world_size()));
  group.all_gather(&failed, sizeof failed, all.data());
  const bool any = std::any_of(all.begin(), all.end(), [](std::int32_t value) { return value; });
  if (any) {
    return 1;
  }
  // CTest is to show that nothing was tested.
  return world.has_gpu() ? 0 : kSkipped;
}

}  // namespace

GpuWorld& gpu_world() {
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
