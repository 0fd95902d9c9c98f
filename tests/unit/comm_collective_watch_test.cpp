// What is said about a collective that does not finish.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "comm/mpi/collective_watch.h"
#include "core/log.h"

namespace kdtree {

namespace {

using std::chrono::seconds;

void wait_in(std::string_view ranks) {
  init_logging("warn", 3, 8);  // to stderr
  CollectiveWatch watch(3, 8, seconds(1));
  { const CollectiveWatch::Scope first(watch, "broadcast", {}, ""); }
  const CollectiveWatch::Scope scope(watch, "all_reduce_sum", {.what = "experts", .layer = 2},
                                     ranks);
  std::this_thread::sleep_for(seconds(30));
}

TEST(CollectiveWatchDeathTest, NamesTheRankItsPartAndThePurpose) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(wait_in("1, 3"), testing::ExitedWithCode(124),
              "rank 3 of 8 waits since 1 s in all_reduce_sum number 2 of ranks 1, 3 "
              "\\(experts, layer 2\\): another rank has not come");
  EXPECT_EXIT(wait_in(""), testing::ExitedWithCode(124),
              "all_reduce_sum number 2 \\(experts, layer 2\\): another rank has not come");
}

}  // namespace

}  // namespace kdtree
