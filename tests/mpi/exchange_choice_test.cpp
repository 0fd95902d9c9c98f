// `--exchange auto`: every rank gets the same table and the same choice.
#include "engine/exchange_choice.h"

#include <gtest/gtest.h>

#include "tests/mpi/shared_bundle.h"
#include "tests/mpi/test_model.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

ExchangeChoice choose_for(const std::string& path, const EngineOptions& options,
                          WeightsChoice weights) {
  ModelSource source;
  run_together(world().group, [&] { source.target = open_target(path); });
  LoadOptions load;
  load.weights = weights;
  return choose_exchange(source, options, load, {world().backend, world().communicator},
                         world().group);
}

TEST(ExchangeChoices, AreMeasuredForEveryExchangeAndEqualOnAllRanks) {
  const EngineOptions options{
      .mode = Mode::kPlain, .batch_size = 3, .max_context = 64, .max_prompt = 8};
  // Of weights that are kept as they are, and rounded while they are loaded.
  const std::string bundle = generated_path("model_int4_tiny.kdtr");
  const std::string floats = source_path("tests/data/goldens/deepseek_v3_fp8_groups");
  for (const auto& [path, weights] :
       {std::pair(bundle, WeightsChoice::kAuto), std::pair(bundle, WeightsChoice::kOriginal),
        std::pair(bundle, WeightsChoice::kQuantized), std::pair(floats, WeightsChoice::kAuto),
        std::pair(floats, WeightsChoice::kInt4)}) {
    const ExchangeChoice choice = choose_for(path, options, weights);
    if (world().size() == 1) {
      EXPECT_TRUE(choice.timings.empty());
      EXPECT_EQ(choice.kind, ExchangeKind::kAllReduce);
      continue;
    }
    EXPECT_EQ(choice.rows, 3);
    ASSERT_EQ(choice.timings.size(), kExchangeKinds.size());
    std::vector<double> times;
    for (std::size_t i = 0; i < kExchangeKinds.size(); ++i) {
      EXPECT_EQ(choice.timings[i].kind, kExchangeKinds[i]);
      EXPECT_GT(choice.timings[i].microseconds, 0);
      times.push_back(choice.timings[i].microseconds);
    }
    EXPECT_EQ(choice.kind, fastest_exchange(choice.timings));
    const std::vector<double> own = times;
    world().group.broadcast(times.data(), static_cast<std::int64_t>(times.size() * sizeof(double)),
                            0);
    EXPECT_EQ(own, times);
    EXPECT_NE(exchange_table(choice).find("<- chosen"), std::string::npos);
  }
}

TEST(ExchangeChoices, AreThoseOfTheLeastTimeUnlessAllReduceIsAboutAsFast) {
  const auto choose = [](double all_reduce, double all_gather, double all_to_all) {
    return fastest_exchange({{ExchangeKind::kAllReduce, all_reduce},
                             {ExchangeKind::kAllGather, all_gather},
                             {ExchangeKind::kAllToAll, all_to_all}});
  };
  EXPECT_EQ(choose(100, 99, 96), ExchangeKind::kAllReduce);
  EXPECT_EQ(choose(100, 94, 96), ExchangeKind::kAllGather);
  EXPECT_EQ(choose(100, 94, 50), ExchangeKind::kAllToAll);
  EXPECT_EQ(choose(100, 200, 300), ExchangeKind::kAllReduce);
}

}  // namespace

}  // namespace kdtree
