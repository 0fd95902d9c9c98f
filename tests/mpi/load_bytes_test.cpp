// What the ranks read from files while they load, against what they hold.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "comm/expert_placement.h"
#include "tests/mpi/placement_case.h"
#include "tests/mpi/shared_bundle.h"
#include "tests/mpi/world.h"
#include "tests/unit/weights_test_support.h"
#include "weights/weight_store.h"

namespace kdtree {

namespace {

// A rank may read so much more than its own share (the scales of an fp8 matrix are read whole).
constexpr double kMostReadOfOwn = 1.05;

CheckpointRecipe recipe(std::int64_t group_size) {
  CheckpointRecipe recipe;
  recipe.target = tiny_target();
  recipe.drafter = tiny_drafter();
  recipe.group_size = group_size;
  recipe.seed = 951;
  return recipe;
}

// Of target and drafter on this rank, where `draft` names one.
LoadStatistics load(const std::string& target, const std::string& draft,
                    SharedPlacement placement = nullptr) {
  LoadStatistics statistics;
  run_together(world().group, [&] {
    const LoadOptions options{.rank = world().rank(), .world_size = world().size()};
    const TargetCheckpoint checkpoint = open_target(target);
    if (!placement) {
      placement = std::make_shared<const ExpertPlacement>(
          ExpertPlacement::linear(checkpoint.config.n_routed_experts, world().size()));
    }
    statistics = load_target(checkpoint, *placement, options, world().backend).load_statistics();
    if (!draft.empty()) {
      statistics += load_drafter(open_drafter(draft), options, world().backend).load_statistics();
    }
  });
  return statistics;
}

std::int64_t tensor_bytes(const TensorTable& tensors) {
  return std::accumulate(
      tensors.begin(), tensors.end(), std::int64_t{0},
      [](std::int64_t sum, const auto& entry) { return sum + entry.second.bytes; });
}

// Checks every rank's count; `stored` are the bytes of all tensors in the files.
void expect_own_share(const LoadStatistics& own, std::int64_t stored) {
  EXPECT_GT(own.own_bytes, 0);
  EXPECT_LE(static_cast<double>(own.bytes_read),
            kMostReadOfOwn * static_cast<double>(own.own_bytes));
  EXPECT_GE(own.bytes_read, own.own_bytes);
  EXPECT_GE(own.seconds, 0);
  std::vector<LoadStatistics> ranks(static_cast<std::size_t>(world().size()));
  world().group.all_gather(&own, sizeof own, ranks.data());
  LoadStatistics all;
  for (const LoadStatistics& rank : ranks) {
    all += rank;
  }
  // Together the ranks hold everything.
  EXPECT_GE(all.own_bytes, stored);
  if (world().size() == 1) {
    EXPECT_EQ(own.bytes_read, stored);
    EXPECT_EQ(own.own_bytes, stored);
    EXPECT_EQ(own.checksum_bytes, 0);
  } else {
    EXPECT_LT(own.bytes_read - own.checksum_bytes, stored);
  }
}

TEST(LoadBytes, OfABundleAreTheOwnShareWithItsChecksums) {
  for (const std::int64_t group_size : {0, 8}) {
    SCOPED_TRACE(group_size);
    const SharedBundle bundle(recipe(group_size));
    const LoadStatistics own = load(bundle.path(), bundle.path());
    std::int64_t stored = 0;
    run_together(world().group, [&] {
      stored = tensor_bytes(open_target(bundle.path()).tensors) +
               tensor_bytes(open_drafter(bundle.path()).tensors);
    });
    expect_own_share(own, stored);
    // The tensors that the ranks read in parts are shared out between them.
    EXPECT_EQ(own.checksum_bytes > 0, world().size() > 1);
  }
}

TEST(LoadBytes, OfADirectoryAreTheOwnShare) {
  for (const std::int64_t group_size : {0, 8}) {
    SCOPED_TRACE(group_size);
    const SharedDirectory directory(recipe(group_size));
    const std::string draft = directory.path() + "/draft";
    const LoadStatistics own = load(directory.path(), draft);
    std::int64_t stored = 0;
    run_together(world().group, [&] {
      stored = tensor_bytes(open_target(directory.path()).tensors) +
               tensor_bytes(open_drafter(draft).tensors);
    });
    expect_own_share(own, stored);
    EXPECT_EQ(own.checksum_bytes, 0);
  }
}

TEST(LoadBytes, OfPublishedLayoutsAreTheOwnShare) {
  for (const char* name : {"deepseek_v3_fp8_groups", "kimi_nested_int4", "uneven_tied"}) {
    SCOPED_TRACE(name);
    const std::string path = goldens_path(name);
    const LoadStatistics own = load(path, "");
    std::int64_t stored = 0;
    run_together(world().group, [&] { stored = tensor_bytes(open_target(path).tensors); });
    expect_own_share(own, stored);
    EXPECT_EQ(own.checksum_bytes, 0);
  }
}

// A rank reads the experts of its slots, a replica as often as it is held.
TEST(LoadBytes, OfReplicasAreTheSlotsOfEachRank) {
  for (const std::int64_t group_size : {0, 8}) {
    SCOPED_TRACE(group_size);
    const CheckpointRecipe stored = recipe(group_size);
    const SharedDirectory directory(stored);
    std::int64_t expert_bytes = 0;  // of one expert of the one layer that has any
    run_together(world().group, [&] {
      for (const auto& [name, tensor] : open_target(directory.path()).tensors) {
        expert_bytes += name.find(".experts.0.") != std::string::npos ? tensor.bytes : 0;
      }
    });
    const LoadStatistics linear = load(directory.path(), "");
    Dice dice(9);
    const SharedPlacement placement = random_placement(dice, stored.target, world().size());
    const LoadStatistics own = load(directory.path(), "", placement);
    const auto slots = [](const ExpertPlacement& placed) {
      return std::ssize(placed.layer(1).experts_of(world().rank()));
    };
    const std::int64_t more =
        slots(*placement) -
        slots(ExpertPlacement::linear(stored.target.n_routed_experts, world().size()));
    EXPECT_GT(expert_bytes, 0);
    EXPECT_EQ(own.own_bytes, linear.own_bytes + more * expert_bytes);
    EXPECT_EQ(own.bytes_read, own.own_bytes);
  }
}

}  // namespace

}  // namespace kdtree
