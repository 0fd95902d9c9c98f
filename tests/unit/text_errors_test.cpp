// Vocabulary files that are damaged or ask for what is not supported: one clear error each.
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/unit/text_test_support.h"
#include "text/tokenizer.h"

namespace kdtree {
namespace {

using Json = nlohmann::json;

void expect_bad_ranks(const std::string& ranks, std::initializer_list<std::string> parts) {
  SCOPED_TRACE(ranks.substr(ranks.size() - std::min<std::size_t>(ranks.size(), 40)));
  expect_input_error([&] { tiny_tiktoken(ranks); }, {"m/tiktoken.model"});
  expect_input_error([&] { tiny_tiktoken(ranks); }, parts);
}

TEST(TextErrors, TiktokenLines) {
  EXPECT_EQ(tiny_tiktoken(byte_ranks("\r\n\nYWI= 256\r\n")).encode("ab", false), Ids{256});
  expect_bad_ranks(byte_ranks("YWI=\n"), {"line 257", "'YWI='", "expected a token in base64"});
  expect_bad_ranks(byte_ranks("YW? 256\n"), {"line 257", "'YW?'", "expected base64"});
  for (const char* token : {"", "YWI", "YWJ=", "Y===", "====", "YW=I", "YW\xc3\xa4", "YWI=YWI="}) {
    expect_bad_ranks(byte_ranks(std::string(token) + " 256\n"), {"line 257", "expected base64"});
  }
  for (const char* rank : {"", "x", "-1", "1.5", "256 ", "+256", "99999999999", "16777216"}) {
    expect_bad_ranks(byte_ranks("YWI= " + std::string(rank) + "\n"),
                     {"line 257: the rank is '" + std::string(rank) + "'", "expected a number"});
  }
}

TEST(TextErrors, TiktokenRanks) {
  expect_bad_ranks(byte_ranks("YWI= 65\n"), {"line 257", "line 66", "rank 65 already"});
  expect_bad_ranks(byte_ranks("YWI= 256\nYWI= 257\n"), {"lines 257 and 258", "same token"});
  expect_bad_ranks(byte_ranks("QQ== 256\n"), {"lines 66 and 257", "same token"});
  expect_bad_ranks(byte_ranks("YWI= 258\n"), {"no line has the rank 256", "highest, 258"});
  std::string ranks = byte_ranks();
  expect_bad_ranks(ranks.substr(0, ranks.size() - 1 - std::string("/w== 255").size()),
                   {"no token is the byte 0xff"});
  expect_bad_ranks("", {"no line holds a token"});
}

void expect_bad_config(const std::string& config, std::initializer_list<std::string> parts) {
  SCOPED_TRACE(config);
  expect_input_error([&] { tiny_tiktoken(byte_ranks(), config); }, {"m/tokenizer_config.json"});
  expect_input_error([&] { tiny_tiktoken(byte_ranks(), config); }, parts);
}

TEST(TextErrors, TiktokenConfig) {
  const auto with = [](const std::string& tokens) {
    return R"({"added_tokens_decoder": {)" + tokens + "}}";
  };
  expect_bad_config("{", {"not valid JSON"});
  expect_bad_config("[]", {"is [], expected an object"});
  expect_bad_config("{}", {"key 'added_tokens_decoder' is missing"});
  expect_bad_config(R"({"added_tokens_decoder": [1]})", {"added_tokens_decoder", "[1]"});
  for (const char* id : {"255", "512", "x", "", "-1", "300x"}) {
    expect_bad_config(with("\"" + std::string(id) + R"(": {"content": "a"})"),
                      {"'" + std::string(id) + "'", "expected ids from 256", "to 511"});
  }
  expect_bad_config(with(R"("256": 3)"), {"added_tokens_decoder.256", "is 3"});
  expect_bad_config(with(R"("256": {})"), {"added_tokens_decoder.256.content", "missing"});
  expect_bad_config(with(R"("256": {"content": 1})"), {"added_tokens_decoder.256.content", "is 1"});
  expect_bad_config(with(R"("256": {"content": ""})"), {"added_tokens_decoder.256.content"});
  expect_bad_config(with(R"("256": {"content": "a", "lstrip": true})"),
                    {"added_tokens_decoder.256.lstrip", "is true, expected false"});
  expect_bad_config(with(R"("256": {"content": "a"}, "257": {"content": "a"})"),
                    {"ids 256 and 257 are both 'a'"});
  expect_bad_config(with(R"("256": {"content": "<|reserved_token_300|>"})"),
                    {"ids 256 and 300 are both"});
  expect_bad_config(with(R"("256": {"content": "a"}, "256": {"content": "b"})"), {"twice"});
}

void expect_bad_json(const std::function<void(Json&)>& damage,
                     std::initializer_list<std::string> parts) {
  Json content = tiny_tokenizer_json();
  damage(content);
  SCOPED_TRACE(*parts.begin());
  expect_input_error([&] { parse_json_tokenizer(content); }, {"m/tokenizer.json"});
  expect_input_error([&] { parse_json_tokenizer(content); }, parts);
}

TEST(TextErrors, JsonVocabularyAndMerges) {
  expect_input_error(
      [] {
        parse_tokenizer_json({"m/tokenizer.json", "{\"model\": "});
      },
      {"m/tokenizer.json", "not valid JSON"});
  expect_input_error([] { parse_tokenizer_json({"m/tokenizer.json", "[]"}); }, {"an object"});
  expect_bad_json([](Json& c) { c.erase("model"); }, {"key 'model' is missing"});
  expect_bad_json([](Json& c) { c["model"] = 3; }, {"key 'model' is 3"});
  expect_bad_json([](Json& c) { c["model"]["type"] = "Unigram"; },
                  {"'model.type'", "\"Unigram\"", "expected BPE"});
  expect_bad_json([](Json& c) { c["model"]["byte_fallback"] = true; }, {"'model.byte_fallback'"});
  expect_bad_json([](Json& c) { c["model"]["dropout"] = 0.5; }, {"'model.dropout'", "0.5"});
  expect_bad_json([](Json& c) { c["model"]["end_of_word_suffix"] = "</w>"; },
                  {"'model.end_of_word_suffix'", "</w>"});
  expect_bad_json([](Json& c) { c["model"]["vocab"] = Json::array(); }, {"'model.vocab'"});
  expect_bad_json([](Json& c) { c["model"]["vocab"].erase("A"); }, {"'A'", "0x41"});
  expect_bad_json([](Json& c) { c["model"]["vocab"]["ab"] = 65; }, {"model.vocab", "is 65"});
  for (const Json& id : {Json(-1), Json(1.5), Json("256"), Json(1 << 24), Json()}) {
    expect_bad_json([&](Json& c) { c["model"]["vocab"]["ab"] = id; }, {"model.vocab.ab"});
  }
  expect_bad_json([](Json& c) { c["model"].erase("merges"); }, {"'model.merges' is missing"});
  for (const Json& merge : {Json("ab"), Json("a b c"), Json(1), Json::array({"a"}),
                            Json::array({"a", 1}), Json("a x"), Json("a \u4f60")}) {
    expect_bad_json([&](Json& c) { c["model"]["merges"] = Json::array({merge}); },
                    {"model.merges[0]", merge.dump()});
  }
  expect_bad_json(
      [](Json& c) {
        c["model"]["vocab"]["ab"] = 256;
        c["model"]["merges"] = Json::array({"a b", Json::array({"a", "b"})});
      },
      {"model.merges[1]", "listed once"});
}

TEST(TextErrors, JsonPipelines) {
  const auto steps = [](Json list) {
    return [list](Json& c) {
      c["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", list}};
    };
  };
  const Json byte_level = tiny_tokenizer_json()["pre_tokenizer"];
  expect_bad_json([](Json& c) { c.erase("pre_tokenizer"); }, {"'pre_tokenizer' is missing"});
  expect_bad_json([](Json& c) { c["pre_tokenizer"]["type"] = "Metaspace"; },
                  {"'pre_tokenizer.type'", "Metaspace"});
  expect_bad_json([](Json& c) { c["pre_tokenizer"]["add_prefix_space"] = true; },
                  {"'pre_tokenizer.add_prefix_space'", "true"});
  expect_bad_json([](Json& c) { c["pre_tokenizer"].erase("add_prefix_space"); },
                  {"'pre_tokenizer.add_prefix_space' is missing"});
  expect_bad_json(steps(Json::array()), {"ends with ByteLevel"});
  expect_bad_json(steps({byte_level, byte_level}), {"pretokenizers[1]", "behind ByteLevel"});
  Json split = {{"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Isolated"}};
  split["behavior"] = "Sideways";
  expect_bad_json(steps({split, byte_level}), {"pretokenizers[0].behavior", "Sideways"});
  split["behavior"] = "Isolated";
  split["pattern"] = {{"Regex", "(a"}};
  expect_bad_json(steps({split, byte_level}),
                  {"pretokenizers[0].pattern.Regex", "'(a'", "regular expression"});
  split["pattern"] = {{"Glob", "*"}};
  expect_bad_json(steps({split, byte_level}), {"pretokenizers[0].pattern.String", "missing"});
  expect_bad_json(
      [](Json& c) {
        c["normalizer"] = {{"type", "NFC"}};
      },
      {"'normalizer.type'", "NFC"});
  expect_bad_json(
      [](Json& c) {
        c["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}}}};
      },
      {"'normalizer.normalizers[0]'", "NFC"});
  expect_bad_json([](Json& c) { c["truncation"] = {{"max_length", 5}}; }, {"'truncation'"});
  expect_bad_json([](Json& c) { c["decoder"] = {{"type", "Metaspace"}}; }, {"'decoder.type'"});
}

TEST(TextErrors, JsonAddedTokens) {
  const auto added = [](Json list) { return [list](Json& c) { c["added_tokens"] = list; }; };
  expect_bad_json(added(3), {"'added_tokens' is 3"});
  expect_bad_json(added({{{"content", "x"}}}), {"added_tokens[0].id", "missing"});
  expect_bad_json(added({{{"id", 256}}}), {"added_tokens[0].content", "missing"});
  expect_bad_json(added({{{"id", 256}, {"content", ""}}}), {"added_tokens[0].content"});
  expect_bad_json(added({{{"id", 65}, {"content", "xyz"}}}), {"added_tokens[0].id", "is 65"});
  expect_bad_json(added({{{"id", 256}, {"content", "A"}}}),
                  {"added_tokens[0].id", "is 256, expected 65"});
  expect_bad_json(added({{{"id", 256}, {"content", "x1"}}, {{"id", 257}, {"content", "x1"}}}),
                  {"added_tokens[1].content", "x1"});
  expect_bad_json(added({{{"id", 256}, {"content", "x1"}, {"single_word", true}}}),
                  {"added_tokens[0].single_word"});
  expect_bad_json(added({{{"id", 256}, {"content", "x1"}, {"special", 1}}}),
                  {"added_tokens[0].special", "is 1"});
}

TEST(TextErrors, Directories) {
  const TemporaryFolder folder;
  expect_input_error([&] { load_tokenizer(folder / ""); }, {"tiktoken.model or tokenizer.json"});
  write_file(folder / "tokenizer.json", tiny_tokenizer_json().dump());
  EXPECT_EQ(load_tokenizer(folder / "").origin(), folder / "tokenizer.json");
  write_file(folder / "tiktoken.model", byte_ranks());
  expect_input_error([&] { load_tokenizer(folder / ""); },
                     {"tokenizer_config.json", "expected beside"});
  write_file(folder / "tokenizer_config.json", R"({"added_tokens_decoder": {}})");
  EXPECT_EQ(load_tokenizer(folder / "").vocab_size(), 512);
}

}  // namespace
}  // namespace kdtree
