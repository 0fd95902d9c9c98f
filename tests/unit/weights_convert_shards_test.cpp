// Shards that ranks load like the whole checkpoint, and what is left of conversions that were
// interrupted or refused.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <limits>
#include <sstream>
#include <string>

#include "tests/unit/convert_test_support.h"
#include "weights/kdtr.h"

namespace kdtree {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// ---- shards -----------------------------------------------------------------------------------

struct ShardCase {
  const char* golden;  // or nullptr for a random checkpoint
  int ranks;
};

class WeightsConvertShards : public ::testing::TestWithParam<ShardCase> {};

TEST_P(WeightsConvertShards, LoadLikeTheWhole) {
  const TemporaryFolder folder;
  const auto [golden, ranks] = GetParam();
  std::string model = folder / "m.kdtr";
  if (golden == nullptr) {
    CheckpointRecipe recipe = recipe_of(8);
    recipe.quantize_all = true;
    write_bundle(recipe, model);
  } else {
    model = goldens_path(golden);
  }
  ConvertOptions options;
  options.shard_for = ranks;
  const ConvertReport report = convert_to(model, folder / "shards", options);
  EXPECT_EQ(report.files.size(), static_cast<std::size_t>(ranks));
  const TargetCheckpoint source = open_target(model);
  const auto backend = make_backend({.name = "cpu"});
  const auto placement = ExpertPlacement::linear(source.config.n_routed_experts, ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const ShardOf reader{.rank = rank, .ranks = ranks};
    const TargetCheckpoint shard = open_target(folder / "shards", reader);
    for (const bool replicate : {false, true}) {
      LoadOptions load{.rank = rank, .world_size = ranks};
      load.replicate_shared_experts = replicate;
      load.piece_bytes = 256;
      const WeightStore own = load_target(shard, placement, load, *backend);
      const LoadStatistics statistics = own.load_statistics();
      EXPECT_LE(static_cast<double>(statistics.bytes_read),
                1.05 * static_cast<double>(statistics.own_bytes));
      expect_same_weights(own, load_target(source, placement, load, *backend),
                          target_tensor_specs(source.config));
    }
    if (golden == nullptr) {
      const LoadOptions load{.rank = rank, .world_size = ranks};
      const DrafterCheckpoint drafter = open_drafter(folder / "shards", reader);
      expect_same_weights(load_drafter(drafter, load, *backend),
                          load_drafter(open_drafter(model), load, *backend),
                          drafter_tensor_specs(drafter.config));
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Cases, WeightsConvertShards,
                         ::testing::Values(ShardCase{"kimi_nested_int4", 1},
                                           ShardCase{"kimi_nested_int4", 3},
                                           ShardCase{"deepseek_v3_fp8_groups", 2},
                                           ShardCase{"deepseek_v3_fp8_groups", 4},
                                           ShardCase{nullptr, 2}, ShardCase{nullptr, 5}));

TEST(WeightsConvert, ShardsOfRoundedExperts) {
  const TemporaryFolder folder;
  const std::string model = goldens_path("deepseek_v3_fp8_groups");
  ConvertOptions options;
  options.shard_for = 2;
  options.group_size = 32;
  convert_to(model, folder / "shards", options);
  const TargetCheckpoint source = open_target(model);
  const auto backend = make_backend({.name = "cpu"});
  const auto placement = ExpertPlacement::linear(source.config.n_routed_experts, 2);
  LoadOptions load{.rank = 1, .world_size = 2};
  const WeightStore own =
      load_target(open_target(folder / "shards", ShardOf{1, 2}), placement, load, *backend);
  load.weights = WeightsChoice::kInt4;
  expect_same_weights(own, load_target(source, placement, load, *backend),
                      target_tensor_specs(source.config));
}

TEST(WeightsConvert, ShardsAreForTheirRanksAlone) {
  const TemporaryFolder folder;
  write_bundle(recipe_of(8), folder / "m.kdtr");
  ConvertOptions options;
  options.shard_for = 2;
  convert_to(folder / "m.kdtr", folder / "shards", options);
  expect_input_error(
      [&] {
        open_target(folder / "shards", ShardOf{0, 3});
      },
      {folder / "shards", "shard-00000-of-00003.kdtr", "rank 0 of 3"});
  const std::string second = folder / "shards/shard-00001-of-00002.kdtr";
  expect_input_error(
      [&] {
        open_target(second, ShardOf{0, 2});
      },
      {second, "for rank 1 of 2", "rank 0 of 2"});
  expect_input_error([&] { convert_to(folder / "shards", folder / "x.kdtr"); }, {"is a shard"});
  // One rank's parts, another one's numbers.
  const auto backend = make_backend({.name = "cpu"});
  const TargetCheckpoint shard = open_target(second);
  const LoadOptions load{.rank = 0, .world_size = 2};
  const auto placement = ExpertPlacement::linear(shard.config.n_routed_experts, 2);
  expect_input_error([&] { load_target(shard, placement, load, *backend); },
                     {second, "the shard holds"});
  // A shard that is damaged is named.
  std::string damaged = read_file(second);
  damaged[damaged.size() - 2] ^= 4;
  write_file(second, damaged);
  expect_input_error(
      [&] {
        load_target(open_target(folder / "shards", ShardOf{1, 2}), placement,
                    {.rank = 1, .world_size = 2}, *backend);
        load_drafter(open_drafter(folder / "shards", ShardOf{1, 2}), {.rank = 1, .world_size = 2},
                     *backend);
      },
      {second, "checksum"});
}

// ---- interrupted and refused ------------------------------------------------------------------

// Writes beyond so many bytes of a file fail while it lives.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    old_handler_ = std::signal(SIGXFSZ, SIG_IGN);
    check(::getrlimit(RLIMIT_FSIZE, &old_) == 0, "no limit to read");
    const rlimit limit{.rlim_cur = bytes, .rlim_max = old_.rlim_max};
    check(::setrlimit(RLIMIT_FSIZE, &limit) == 0, "no limit set");
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_{};
  void (*old_handler_)(int) = SIG_DFL;
};

class WeightsConvertStops : public ::testing::Test {
 protected:
  void SetUp() override {
    write_bundle(recipe_of(0), folder_ / "m.kdtr");
    options_.group_size = 8;
    convert_to(folder_ / "m.kdtr", folder_ / "whole.kdtr", options_);
    // Far enough behind the header that some tensors are finished.
    const auto bytes = fs::file_size(folder_ / "whole.kdtr");
    const FileSizeLimit limit(bytes * 3 / 4);
    ConvertOptions options = options_;
    options.model = folder_ / "m.kdtr";
    options.output = folder_ / "x.kdtr";
    options.num_threads = 1;
    EXPECT_THROW(convert(options), Error);
    EXPECT_FALSE(fs::exists(folder_ / "x.kdtr"));
    EXPECT_TRUE(fs::exists(partial_));
  }

  std::int64_t resume() {
    const ConvertReport report = convert_to(folder_ / "m.kdtr", folder_ / "x.kdtr", options_);
    EXPECT_EQ(read_file(folder_ / "x.kdtr"), read_file(folder_ / "whole.kdtr"));
    EXPECT_FALSE(fs::exists(folder_ / "x.kdtr.partial"));
    EXPECT_GT(report.quantized.front().relative_error, 0);
    return report.num_resumed;
  }

  TemporaryFolder folder_;
  ConvertOptions options_;
  std::string partial_ = folder_ / "x.kdtr.partial/bundle.kdtr";
};

TEST_F(WeightsConvertStops, GoOnWhereTheyWere) {
  EXPECT_GT(resume(), 3);
}

TEST_F(WeightsConvertStops, ReadWhatIsThereAgain) {
  // The first tensor of the file was written first.
  std::int64_t first = std::numeric_limits<std::int64_t>::max();
  for (const auto& [name, raw] : read_kdtr_header(folder_ / "whole.kdtr").tensors) {
    first = std::min(first, raw.file_offset);
  }
  std::string content = read_file(partial_);
  content[static_cast<std::size_t>(first)] ^= 1;
  write_file(partial_, content);
  std::int64_t num_finished = 0;
  std::istringstream journal(read_file(folder_ / "x.kdtr.partial/convert.journal"));
  for (std::string line; std::getline(journal, line);) {
    num_finished += std::ssize(Json::parse(line).value("checksums", Json::array()));
  }
  EXPECT_GT(num_finished, 3);
  EXPECT_EQ(resume(), num_finished - 1);
}

TEST_F(WeightsConvertStops, AcceptATornJournal) {
  const std::string journal = folder_ / "x.kdtr.partial/convert.journal";
  std::string content = read_file(journal);
  write_file(journal, content.substr(0, content.size() - 7));
  EXPECT_GT(resume(), 2);
}

TEST_F(WeightsConvertStops, StartOverForSomethingElse) {
  options_.group_size = 16;
  convert_to(folder_ / "m.kdtr", folder_ / "whole.kdtr", {.group_size = 16, .overwrite = true});
  EXPECT_EQ(resume(), 0);
}

TEST_F(WeightsConvertStops, StartOverWhenTheSourceHasChanged) {
  fs::last_write_time(folder_ / "m.kdtr", fs::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_EQ(resume(), 0);
}

TEST(WeightsConvert, NothingIsReplacedUnasked) {
  const TemporaryFolder folder;
  write_bundle(recipe_of(0), folder / "m.kdtr");
  write_file(folder / "x.kdtr", "precious");
  expect_input_error([&] { convert_to(folder / "m.kdtr", folder / "x.kdtr"); },
                     {folder / "x.kdtr", "exists", "--overwrite"});
  EXPECT_EQ(read_file(folder / "x.kdtr"), "precious");
  convert_to(folder / "m.kdtr", folder / "x.kdtr", {.overwrite = true});
  EXPECT_EQ(contents_of(folder / "x.kdtr"), contents_of(folder / "m.kdtr"));

  convert_to(folder / "m.kdtr", folder / "d/");
  expect_input_error([&] { convert_to(folder / "m.kdtr", folder / "d"); }, {"--overwrite"});
  write_file(folder / "d/thesis.tex", "precious");
  expect_input_error([&] { convert_to(folder / "m.kdtr", folder / "d", {.overwrite = true}); },
                     {folder / "d/thesis.tex", "remove it first"});
  fs::remove(folder / "d/thesis.tex");
  const TensorContents before = contents_of(folder / "d");
  convert_to(folder / "m.kdtr", folder / "d", {.overwrite = true});
  EXPECT_EQ(contents_of(folder / "d"), before);
  EXPECT_FALSE(fs::exists(folder / "d/convert.journal"));
  EXPECT_FALSE(fs::exists(folder / "d.partial"));

  write_file(folder / "y.kdtr.partial", "somebody's");
  expect_input_error([&] { convert_to(folder / "m.kdtr", folder / "y.kdtr"); },
                     {folder / "y.kdtr.partial", "in the way"});
  EXPECT_THROW(convert_to(folder / "m.kdtr", folder / "no/such/x.kdtr"), InputError);
}

}  // namespace
}  // namespace kdtree
