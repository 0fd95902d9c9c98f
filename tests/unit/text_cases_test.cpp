// The tokenizers against ids that the packages `tokenizers` and `tiktoken` computed
// (tests/reference/make_tokenizer_cases.py).
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/text_test_support.h"
#include "text/tokenizer.h"

namespace kdtree {
namespace {

using Json = nlohmann::json;

class TextCases : public testing::TestWithParam<const char*> {};

TEST_P(TextCases, EqualThePublishedPackages) {
  const Tokenizer tokenizer = load_tokenizer(tokenizer_path(GetParam()));
  const std::vector<Json> cases = read_json_lines(tokenizer_path(GetParam()) + "/cases.jsonl");
  EXPECT_GT(cases.size(), 400U);
  for (const Json& line : cases) {
    expect_case(tokenizer, line);
  }
}

TEST_P(TextCases, DecodingGivesTheTextBack) {
  const Tokenizer tokenizer = load_tokenizer(tokenizer_path(GetParam()));
  for (const Json& line : read_json_lines(tokenizer_path(GetParam()) + "/cases.jsonl")) {
    if (line.contains("ids")) {
      const Ids ids = line["ids"].get<Ids>();
      EXPECT_EQ(tokenizer.decode(ids), line["text"].get<std::string>()) << line;
      EXPECT_EQ(stream_decode(tokenizer, ids), line["text"].get<std::string>()) << line;
    }
  }
}

TEST_P(TextCases, ThreadsDoNotDisturbEachOther) {
  const Tokenizer tokenizer = load_tokenizer(tokenizer_path(GetParam()));
  const std::vector<Json> cases = read_json_lines(tokenizer_path(GetParam()) + "/cases.jsonl");
  std::vector<std::thread> threads;
  for (std::size_t first = 0; first < 4; ++first) {
    threads.emplace_back([&, first] {
      for (std::size_t i = 0; i < 400; ++i) {
        expect_case(tokenizer, cases[(first * 100 + i) % 400]);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

INSTANTIATE_TEST_SUITE_P(Small, TextCases, testing::Values("deepseek_like", "kimi_like"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST(TextVariants, EqualThePublishedPackage) {
  const Json base = Json::parse(read_file(tokenizer_path("deepseek_like/tokenizer.json")));
  for (const Json& variant : read_json_lines(tokenizer_path("deepseek_like/variants.jsonl"))) {
    SCOPED_TRACE(variant["name"].get<std::string>());
    Json content = base;
    content.merge_patch(variant["patch"]);
    const Tokenizer tokenizer = parse_json_tokenizer(content);
    for (const Json& line : variant["cases"]) {
      expect_case(tokenizer, line);
    }
  }
}

TEST(TextVariants, MergesMayBeSpelledAsPairs) {
  Json content = Json::parse(read_file(tokenizer_path("deepseek_like/tokenizer.json")));
  for (Json& merge : content["model"]["merges"]) {
    const std::string text = merge.get<std::string>();
    const std::size_t blank = text.find(' ');
    merge = Json::array({text.substr(0, blank), text.substr(blank + 1)});
  }
  const Tokenizer tokenizer = parse_json_tokenizer(content);
  for (const Json& line : read_json_lines(tokenizer_path("deepseek_like/cases.jsonl"))) {
    expect_case(tokenizer, line);
  }
}

// tests/reference/check_tokenizer.py runs this with a vocabulary of one's own.
TEST(TextPublished, EqualsThePackage) {
  const char* folder = std::getenv("KDTREE_TOKENIZER_CASES");
  if (folder == nullptr) {
    GTEST_SKIP() << "KDTREE_TOKENIZER_CASES is not set";
  }
  const Tokenizer tokenizer = load_tokenizer(folder);
  for (const Json& line : read_json_lines(std::string(folder) + "/cases.jsonl")) {
    expect_case(tokenizer, line);
  }
}

}  // namespace
}  // namespace kdtree
