// plan_run: equal to the memory plan of each rank, and to figures worked out by hand.
#include <gtest/gtest.h>

#include <string>

#include "placement/policies.h"
#include "study/run_plan.h"
#include "tests/unit/weights_test_support.h"
#include "weights/random_checkpoint.h"

namespace kdtree {
namespace {

RunPlanOptions some_options(int num_ranks) {
  RunPlanOptions options;
  options.num_ranks = num_ranks;
  options.engine = {.mode = Mode::kPlain, .max_context = 100, .max_prompt = 100};
  options.load.round_to_bfloat16 = true;
  return options;
}

std::int64_t entry_of(const MemoryPlan& plan, const std::string& what) {
  for (const MemoryPlan::Entry& entry : plan.entries) {
    if (entry.what == what) {
      return entry.bytes;
    }
  }
  ADD_FAILURE() << "no entry " << what;
  return 0;
}

void expect_equal(const MemoryPlan& a, const MemoryPlan& b) {
  ASSERT_EQ(a.entries.size(), b.entries.size());
  for (std::size_t i = 0; i < a.entries.size(); ++i) {
    EXPECT_EQ(a.entries[i].what, b.entries[i].what);
    EXPECT_EQ(a.entries[i].bytes, b.entries[i].bytes) << a.entries[i].what;
  }
}

TEST(RunPlan, IsTheMemoryPlanOfEveryRank) {
  const ModelSource source{.target = planned_target(models_path("tiny")), .drafter = std::nullopt};
  for (const char* backend : {"cpu", "cuda"}) {
    const auto traits = make_memory_traits(backend, DType::kBFloat16);
    for (const ExchangeKind exchange : kExchangeKinds) {
      for (const int num_ranks : {1, 2, 3, 4}) {
        RunPlanOptions options = some_options(num_ranks);
        options.engine.exchange = exchange;
        if (num_ranks > 1) {  // two slots more in each layer
          const ModelConfig& config = source.target.config;
          options.engine.placement = std::make_shared<const ExpertPlacement>(
              place_layers(empty_loads(config), config.n_routed_experts + 2, config, num_ranks));
        }
        const RunPlan run = plan_run(source, options, *traits);
        ASSERT_EQ(run.ranks.size(), static_cast<std::size_t>(num_ranks));
        for (int rank = 0; rank < num_ranks; ++rank) {
          SCOPED_TRACE(testing::Message() << backend << " rank " << rank << " of " << num_ranks);
          expect_equal(run.ranks[static_cast<std::size_t>(rank)],
                       memory_plan(source, options.engine,
                                   rank_load_options(options.load, rank, num_ranks, options.engine),
                                   *traits));
        }
      }
    }
  }
}

TEST(RunPlan, HoldsEveryExpertOfKimiOnceWhateverTheNumberOfRanks) {
  const ModelSource source{.target = planned_target(models_path("kimi-k2.6-4-layers")),
                           .drafter = std::nullopt};
  const auto traits = make_memory_traits("cuda", DType::kBFloat16);
  // Four bits a value and a bf16 scale for 32 of them.
  constexpr std::int64_t kExpertBytes = std::int64_t{3} * 7168 * 2048 * 9 / 16;
  constexpr std::int64_t kMoeLayers = 3;
  for (const int num_ranks : {1, 7, 8}) {
    const RunPlan run = plan_run(source, some_options(num_ranks), *traits);
    std::int64_t routed = 0;
    for (const MemoryPlan& plan : run.ranks) {
      routed += entry_of(plan, "routed experts");
    }
    EXPECT_EQ(routed, kMoeLayers * 384 * kExpertBytes) << num_ranks;
    // 384 = 7 * 54 + 6: the last of seven ranks holds one expert less than the others.
    EXPECT_EQ(entry_of(run.ranks.front(), "routed experts"),
              kMoeLayers * ((384 + num_ranks - 1) / num_ranks) * kExpertBytes);
    EXPECT_EQ(entry_of(run.ranks.back(), "routed experts"),
              kMoeLayers * (384 / num_ranks) * kExpertBytes);
    // 576 bf16 values a token and layer, for the context and two steps behind it.
    EXPECT_EQ(entry_of(run.ranks.front(), "latent cache"), std::int64_t{4} * 102 * 576 * 2);
    EXPECT_EQ(entry_of(run.ranks.front(), "device reserve"), kDeviceReserveBytes);
  }
}

TEST(RunPlan, TheLargestContextFillsTheRoomAndNotMore) {
  const ModelSource source{.target = planned_target(models_path("tiny")), .drafter = std::nullopt};
  const auto traits = make_memory_traits("cpu", DType::kFloat32);
  RunPlanOptions options = some_options(3);
  options.engine.max_context = 2;
  constexpr std::int64_t kMemory = 4'000'000;
  options.room = {.memory_bytes = kMemory, .goal = {.fraction = 0.5, .limit = 1 << 20}};
  const RunPlan run = plan_run(source, options, *traits);
  EXPECT_GT(run.max_context, 2);
  EXPECT_LE(run.peak_bytes(), kMemory / 2);
  RunPlanOptions more = options;
  more.room.reset();
  more.engine.max_context = run.max_context + 1;
  EXPECT_GT(plan_run(source, more, *traits).peak_bytes(), kMemory / 2);

  options.room->goal.limit = 20;
  EXPECT_EQ(plan_run(source, options, *traits).max_context, 20);
  options.room->memory_bytes = 1000;
  EXPECT_THROW(plan_run(source, options, *traits), InputError);
}

TEST(RunPlan, TraitsOfABackendAreItsOwn) {
  const std::unique_ptr<Backend> backend = make_backend({.name = "cpu"});
  const auto traits = make_memory_traits("cpu", DType::kBFloat16);
  EXPECT_EQ(traits->activation_dtype(), backend->activation_dtype());
  EXPECT_EQ(traits->asynchronous(), backend->asynchronous());
  EXPECT_EQ(traits->experts_workspace_bytes(5, 2, 24, 8),
            backend->experts_workspace_bytes(5, 2, 24, 8));
  EXPECT_EQ(make_memory_traits("cuda", DType::kBFloat16)->activation_dtype(), DType::kBFloat16);
  EXPECT_THROW(make_memory_traits("tpu", DType::kFloat32), InputError);
}

}  // namespace
}  // namespace kdtree
