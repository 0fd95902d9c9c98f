// The memory plan of a rank against what is allocated.
#include "engine/memory_plan.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "engine/engine.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/mpi/grid_case.h"
#include "tests/mpi/placement_case.h"
#include "tests/mpi/random_case.h"
#include "tests/mpi/shared_bundle.h"
#include "tests/mpi/test_model.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

// Sums up what is asked of allocate(): device memory. Memory of the host is not planned.
class CountingBackend final : public CpuBackend {
 public:
  CountingBackend() : CpuBackend(1) {}
  Buffer allocate(std::int64_t bytes) override {
    allocated_ += bytes;
    return CpuBackend::allocate(bytes);
  }
  Buffer allocate_host(std::int64_t bytes) override { return CpuBackend::allocate(bytes); }
  std::int64_t allocated() const { return allocated_; }

 private:
  std::int64_t allocated_ = 0;
};

ModelSource open_bundle(const std::string& path) {
  ModelSource source;
  run_together(world().group, [&] {
    source.target = open_target(path);
    if (holds_drafter(path)) {
      source.drafter = open_drafter(path);
    }
  });
  return source;
}

TEST(MemoryPlan, IsWhatModelAndEngineAllocate) {
  for (std::uint64_t seed = 940; seed < 948; ++seed) {
    const RandomCase random = random_case(seed, world().size());
    const SharedBundle bundle(random.recipe);
    const ModelSource source = open_bundle(bundle.path());
    for (const Mode mode : {Mode::kPlain, Mode::kChain, Mode::kTree}) {
      if (mode != Mode::kPlain && !source.drafter) {
        continue;
      }
      for (const ExchangeKind exchange : kExchangeKinds) {
        SCOPED_TRACE(testing::Message() << describe(random) << " " << mode_name(mode) << " "
                                        << exchange_name(exchange));
        Dice dice(seed);
        EngineOptions options{.mode = mode,
                              .tree_budget = random.engine.tree_budget,
                              .batch_size = 1 + static_cast<std::int64_t>(seed % 3),
                              .max_context = 30,
                              .max_prompt = 12,
                              .max_top_logits = static_cast<std::int64_t>(seed % 2),
                              .record_steps = seed % 2 == 0,
                              .record_experts = seed % 3 == 0,
                              .score_windows = seed % 3 == 1,
                              .exchange = exchange,
                              .placement = {}};
        const std::vector<ParallelGrid> grids =
            grids_of(source.target.config, std::max<std::int64_t>(1, random.recipe.group_size));
        options.grid = grids[seed % grids.size()];
        const RankGroups groups(world().communicator, options.grid);
        if (seed % 4 != 0) {
          options.placement =
              random_placement(dice, source.target.config, options.grid.moe_ep(world().size()));
        }
        LoadOptions load;
        load.round_to_bfloat16 = random.round_to_bfloat16;
        CountingBackend backend;
        std::int64_t planned = 0;
        run_together(world().group, [&] {
          planned =
              memory_plan(source, options,
                          rank_load_options(load, world().rank(), world().size(), options), backend)
                  .total_bytes();
          const LoadedModel model(source, options, load, world().group, backend);
          const Engine engine(model, options, backend, groups, world().group);
        });
        EXPECT_EQ(backend.allocated(), planned);
      }
    }
  }
}

}  // namespace

}  // namespace kdtree
