// Host values between ranks, and failures that all ranks learn of.
#include "comm/process_group.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/mpi/world.h"

namespace kdtree {

namespace {

// What run_together throws; "" if it does not.
std::string agreed_text(const std::function<void()>& body) {
  try {
    run_together(world().group, body);
    return "";
  } catch (const AgreedError& error) {
    return error.what();
  }
}

TEST(ProcessGroupOps, BroadcastAndGather) {
  ProcessGroup& group = world().group;
  for (int root = 0; root < group.world_size(); ++root) {
    auto value = static_cast<std::int64_t>(group.rank()) * 10;
    group.broadcast(&value, sizeof value, root);
    EXPECT_EQ(value, root * 10);
  }
  const std::int32_t own = group.rank() + 100;
  std::vector<std::int32_t> all(static_cast<std::size_t>(group.world_size()), -1);
  group.all_gather(&own, sizeof own, all.data());
  for (int rank = 0; rank < group.world_size(); ++rank) {
    EXPECT_EQ(all[static_cast<std::size_t>(rank)], rank + 100);
  }
  group.broadcast(nullptr, 0, 0);
  group.barrier();
  EXPECT_GE(group.local_rank(), 0);
  EXPECT_LT(group.local_rank(), group.local_size());
  EXPECT_FALSE(group.host_name().empty());
}

TEST(ProcessGroupOps, NobodyFailsAndNobodyThrows) {
  int calls = 0;
  EXPECT_EQ(agreed_text([&calls] { ++calls; }), "");
  EXPECT_EQ(calls, 1);
}

TEST(ProcessGroupOps, OneRankFailsAndAllThrow) {
  for (int failing = 0; failing < world().size(); ++failing) {
    const std::string text = agreed_text([failing] {
      if (world().rank() == failing) {
        throw InputError("the file is broken");
      }
    });
    // Rank 0 alone reads prompts: its errors, and those of all, need no rank.
    const std::string expected = failing == 0
                                     ? "the file is broken"
                                     : "rank " + std::to_string(failing) + ": the file is broken";
    EXPECT_EQ(text, expected);
  }
}

TEST(ProcessGroupOps, TheSameTextOfAllRanksIsSaidOnce) {
  EXPECT_EQ(agreed_text([] { throw Error("no such file"); }), "no such file");
}

TEST(ProcessGroupOps, DifferentTextsNameTheirRanks) {
  const std::string text =
      agreed_text([] { throw Error(world().rank() == 0 ? "short" : "a much longer text"); });
  std::string others;
  for (int rank = 1; rank < world().size(); ++rank) {
    others += (rank == 1 ? "" : ", ") + std::to_string(rank);
  }
  EXPECT_EQ(text, world().size() == 1 ? "short"
                                      : "rank 0: short\nrank " + others + ": a much longer text");
}

TEST(ProcessGroupOps, WorksAgainAfterAFailure) {
  EXPECT_EQ(agreed_text([] { throw Error("once"); }), "once");
  EXPECT_EQ(agreed_text([] {}), "");
}

TEST(ProcessGroupOps, TwoOfManyFailingAlikeAreNamedTogether) {
  if (world().size() < 3) {
    GTEST_SKIP() << "needs three ranks";
  }
  const std::string text = agreed_text([] {
    if (world().rank() >= 1 && world().rank() <= 2) {
      throw Error("full");
    }
  });
  EXPECT_EQ(text, "rank 1, 2: full");
}

}  // namespace

}  // namespace kdtree
