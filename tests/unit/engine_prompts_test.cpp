// The prompts of a run, from flags and files.
#include <gtest/gtest.h>

#include "config/run_config.h"
#include "tests/unit/weights_test_support.h"

namespace kdtree {

namespace {

using Ids = std::vector<std::int32_t>;
using Kind = PromptInput::Kind;

// The ids of prompts that are ids.
std::vector<Ids> ids_of(const std::vector<PromptInput>& prompts) {
  std::vector<Ids> all;
  for (const PromptInput& prompt : prompts) {
    EXPECT_EQ(prompt.kind, Kind::kIds);
    all.push_back(prompt.ids);
  }
  return all;
}

std::vector<Ids> from_flags(const std::vector<std::string>& texts) {
  RunConfig config;
  config.prompt_ids = texts;
  return ids_of(read_prompts(config));
}

class EnginePrompts : public testing::Test {
 protected:
  std::vector<PromptInput> from_file(const std::string& content) {
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
  EXPECT_EQ(
      ids_of(from_file("{\"prompt_ids\": [1, 2]}\n\n  \r\n{\"prompt_ids\": [], \"note\": 3}")),
      (std::vector<Ids>{{1, 2}, {}}));
}

TEST_F(EnginePrompts, TextsAndConversations) {
  const std::string chat = R"({"messages": [{"role": "user", "content": "Hi"}]})";
  const std::vector<PromptInput> prompts =
      from_file("{\"prompt\": \"a\\nb\"}\n" + chat + "\n{\"prompt_ids\": [3]}");
  ASSERT_EQ(prompts.size(), 3U);
  EXPECT_EQ(prompts[0].kind, Kind::kText);
  EXPECT_EQ(prompts[0].text, "a\nb");
  EXPECT_EQ(prompts[0].origin, path_ + ": line 1");
  EXPECT_EQ(prompts[1].kind, Kind::kChat);
  EXPECT_EQ(prompts[1].chat, nlohmann::ordered_json::parse(chat));
  EXPECT_EQ(prompts[1].origin, path_ + ": line 2");
  EXPECT_EQ(prompts[2].kind, Kind::kIds);
  EXPECT_EQ(prompts[2].ids, Ids{3});
}

TEST_F(EnginePrompts, AllSourcesInOrder) {
  const std::string chat_path = folder_ / "chat.json";
  write_file(path_, "{\"prompt_ids\": [1]}");
  write_file(chat_path, "[{\"role\": \"user\"}]");
  RunConfig config;
  config.prompts = path_;
  config.prompt = {"a", "b"};
  config.chat = chat_path;
  const std::vector<PromptInput> prompts = read_prompts(config);
  ASSERT_EQ(prompts.size(), 4U);
  EXPECT_EQ(prompts[0].kind, Kind::kIds);
  EXPECT_EQ(prompts[2].text, "b");
  EXPECT_EQ(prompts[2].origin, "--prompt (number 1)");
  EXPECT_EQ(prompts[3].kind, Kind::kChat);
  EXPECT_EQ(prompts[3].chat[0]["role"], "user");
  EXPECT_EQ(prompts[3].origin, chat_path);
}

TEST_F(EnginePrompts, WrongLinesAreNamed) {
  const std::string good = "{\"prompt_ids\": [1]}\n";
  expect_input_error([&] { from_file(good + "[1]"); }, {path_, "line 2", "object"});
  expect_input_error([&] { from_file(good + "\n{\"prompt\": 1}"); },
                     {path_, "line 3", "prompt is 1, expected a string"});
  expect_input_error([&] { from_file("{\"text\": \"a\"}"); },
                     {"line 1", "expected one of the keys prompt_ids, prompt and messages"});
  expect_input_error([&] { from_file("{\"prompt\": \"a\", \"messages\": []}"); },
                     {"line 1", "expected one of the keys"});
  expect_input_error([&] { from_file("{\"prompt_ids\": \"1\"}"); }, {"line 1", "list"});
  expect_input_error([&] { from_file("{\"prompt_ids\": [1, 2.5]}"); }, {"line 1", "2.5"});
  expect_input_error([&] { from_file("{\"prompt_ids\": [3000000000]}"); },
                     {"line 1", "3000000000"});
  expect_input_error([&] { from_file("{\"prompt_ids\": [18446744073709551615]}"); }, {"line 1"});
  expect_input_error([&] { from_file("{\"prompt_ids\": [true]}"); }, {"line 1", "true"});
  expect_input_error([&] { from_file("{\"prompt_ids\": [1]"); }, {"line 1"});
  expect_input_error([&] { from_file("{\"prompt\": \"a\", \"prompt\": \"b\"}"); },
                     {"line 1", "holds the key \"prompt\" twice"});
  expect_input_error([&] { from_file(good + "hello"); }, {"line 2", "not valid JSON"});
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
