// The prompts of a run, from flags and files.
#include <gtest/gtest.h>

#include "config/run_config.h"
#include "tests/unit/weights_test_support.h"

namespace kdtree {

namespace {

using Ids = std::vector<std::int32_t>;

std::vector<Ids> from_flags(const std::vector<std::string>& texts) {
  RunConfig config;
  config.prompt_ids = texts;
  return read_prompts(config);
}

class EnginePrompts : public testing::Test {
 protected:
  std::vector<Ids> from_file(const std::string& content) {
    write_file(path_, content);
    RunConfig config;
    config.prompts = path_;
    return read_prompts(config);
  }

  TemporaryFolder folder_;
  std::string path_ = folder_ / "prompts.jsonl";
};

TEST_F(EnginePrompts, Flags) {
  EXPECT_EQ(from_flags({"1,2,3", " 7 , 8 ", "5"}), (std::vector<Ids>{{1, 2, 3}, {7, 8}, {5}}));
  EXPECT_EQ(from_flags({""}), (std::vector<Ids>{{}}));  // refused with the prompts of all sources
  EXPECT_TRUE(from_flags({}).empty());
  for (const char* text : {"1,,2", "1,", ",1", "a", "1 2", "1.5", "0x10", "99999999999", "+1"}) {
    expect_input_error([text] { from_flags({text}); }, {"--prompt-ids", "1,2,3"});
  }
}

TEST_F(EnginePrompts, Files) {
  EXPECT_EQ(from_file("{\"prompt_ids\": [1, 2]}\n\n  \r\n{\"prompt_ids\": [], \"note\": 3}"),
            (std::vector<Ids>{{1, 2}, {}}));
}

TEST_F(EnginePrompts, WrongLinesAreNamed) {
  const std::string good = "{\"prompt_ids\": [1]}\n";
  expect_input_error([&] { from_file(good + "[1]"); }, {path_, "line 2", "object"});
  expect_input_error([&] { from_file(good + "\n{\"prompt\": 1}"); },
                     {path_, "line 3", "prompt_ids is missing"});
  expect_input_error([&] { from_file("{\"prompt_ids\": \"1\"}"); }, {"line 1", "list"});
  expect_input_error([&] { from_file("{\"prompt_ids\": [1, 2.5]}"); }, {"line 1", "2.5"});
  expect_input_error([&] { from_file("{\"prompt_ids\": [3000000000]}"); },
                     {"line 1", "3000000000"});
  expect_input_error([&] { from_file("{\"prompt_ids\": [18446744073709551615]}"); }, {"line 1"});
  expect_input_error([&] { from_file("{\"prompt_ids\": [true]}"); }, {"line 1", "true"});
  expect_input_error([&] { from_file("{\"prompt_ids\": [1]"); }, {"line 1"});
  expect_input_error([&] { from_file("\n\n"); }, {path_, "no prompt"});
}

TEST_F(EnginePrompts, MissingFilesAndTwoSources) {
  RunConfig config;
  config.prompts = folder_ / "absent.jsonl";
  expect_input_error([&] { read_prompts(config); }, {"--prompts", "absent.jsonl"});
  config.prompt_ids = {"1"};
  expect_input_error([&] { read_prompts(config); }, {"--prompt-ids", "--prompts", "not both"});
}

}  // namespace

}  // namespace kdtree
