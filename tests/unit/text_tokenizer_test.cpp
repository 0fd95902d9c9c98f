// Tokenizers made by hand: what each method promises.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "tests/unit/text_test_support.h"
#include "text/byte_pairs.h"
#include "text/long_text.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace kdtree {
namespace {

using Json = nlohmann::json;

constexpr const char* kConfig = R"({"added_tokens_decoder": {
  "259": {"content": "<|im_end|>", "special": true},
  "260": {"content": "<think>", "special": false},
  "261": {"content": "<|im_end|>+"}}})";

// Ranks 256 to 258: "ab", "bc", "abcd".
const std::string kLonger = "YWI= 256\nYmM= 257\nYWJjZA== 258\n";

TEST(TextTokenizer, TiktokenMergesByRankOfWhatIsJoined) {
  const Tokenizer tokenizer = tiny_tiktoken(byte_ranks(kLonger));
  EXPECT_EQ(tokenizer.encode("ab", false), Ids{256});
  EXPECT_EQ(tokenizer.encode("abc", false), (Ids{256, 'c'}));
  EXPECT_EQ(tokenizer.encode("bcab", false), (Ids{257, 256}));
  // No two neighbours lead there, but the whole piece is a token.
  EXPECT_EQ(tokenizer.encode("abcd", false), Ids{258});
  EXPECT_EQ(tokenizer.encode("xabcd", false), (Ids{'x', 256, 'c', 'd'}));
  EXPECT_TRUE(tokenizer.encode("", true).empty());
}

TEST(TextTokenizer, JsonMergesByTheListAlone) {
  Json content = tiny_tokenizer_json();
  content["model"]["vocab"].update({{"ab", 256}, {"abcd", 257}, {"bc", 258}});
  content["model"]["merges"] = Json::array({"b c", "a b"});
  EXPECT_EQ(parse_json_tokenizer(content).encode("abc", false), (Ids{'a', 258}));
  EXPECT_EQ(parse_json_tokenizer(content).encode("abab", false), (Ids{256, 256}));
  EXPECT_EQ(parse_json_tokenizer(content).encode("abcd", false), (Ids{'a', 258, 'd'}));
  content["model"]["ignore_merges"] = true;
  EXPECT_EQ(parse_json_tokenizer(content).encode("abcd", false), Ids{257});
}

TEST(TextTokenizer, SpecialTokensAreParsedOnDemand) {
  const Tokenizer tokenizer = tiny_tiktoken(byte_ranks(kLonger), kConfig);
  EXPECT_EQ(tokenizer.encode("ab<|im_end|>ab", true), (Ids{256, 259, 256}));
  EXPECT_EQ(tokenizer.encode("<|im_end|>+", true), Ids{261}) << "the longest of those that begin";
  EXPECT_EQ(tokenizer.encode("<|im_end|", true).size(), 9U);
  EXPECT_EQ(tokenizer.encode("<|reserved_token_300|>", true), Ids{300});
  const Ids plain = tokenizer.encode("<|im_end|>", false);
  EXPECT_EQ(plain.size(), 10U);
  EXPECT_EQ(tokenizer.decode(plain), "<|im_end|>");
}

TEST(TextTokenizer, PlainTextIsNeverAControlToken) {
  Json content = tiny_tokenizer_json();
  content["model"]["vocab"]["<|EOT|>"] = 256;
  content["model"]["vocab"]["<\uff5c>"] = 257;
  content["model"]["ignore_merges"] = true;
  content["added_tokens"] = Json::array({{{"id", 256}, {"content", "<|EOT|>"}, {"special", true}}});
  const Tokenizer tokenizer = parse_json_tokenizer(content);
  EXPECT_EQ(tokenizer.encode("<|EOT|>", true), Ids{256});
  EXPECT_EQ(tokenizer.encode("<|EOT|>", false).size(), 7U);
  EXPECT_EQ(tokenizer.encode("<\uff5c>", false).size(), 5U);
}

TEST(TextTokenizer, KnowsItsTokens) {
  const Tokenizer tokenizer = tiny_tiktoken(byte_ranks(kLonger), kConfig);
  EXPECT_EQ(tokenizer.vocab_size(), 259 + 256);
  EXPECT_EQ(tokenizer.token_bytes(0), std::string(1, '\0'));
  EXPECT_EQ(tokenizer.token_bytes(258), "abcd");
  EXPECT_EQ(tokenizer.token_bytes(260), "<think>");
  EXPECT_EQ(tokenizer.decode(Ids{258, 259, 0xe4}), "abcd<|im_end|>\xe4");
  EXPECT_TRUE(tokenizer.is_special(259));
  EXPECT_FALSE(tokenizer.is_special(260));
  EXPECT_FALSE(tokenizer.is_special(65));
  EXPECT_TRUE(tokenizer.is_special(300));
  EXPECT_EQ(tokenizer.find_added("<think>"), 260);
  EXPECT_EQ(tokenizer.find_added("ab"), std::nullopt) << "not an added token";
  const std::vector<std::string> ends = {"<|im_end|>", "<think>"};
  EXPECT_EQ(tokenizer.added_ids(ends), (Ids{259, 260}));
  const std::vector<std::string> unknown = {"<|eot|>"};
  expect_input_error([&] { tokenizer.added_ids(unknown); }, {"m/tiktoken.model", "<|eot|>"});
}

TEST(TextTokenizer, RefusesIdsOutsideOfTheVocabulary) {
  Json content = tiny_tokenizer_json();
  content["added_tokens"] = Json::array({{{"id", 300}, {"content", "xyz"}}});
  const Tokenizer tokenizer = parse_json_tokenizer(content);
  for (const std::int32_t id : {-1, 256, 299, 301, INT32_MAX, INT32_MIN}) {
    expect_input_error([&] { tokenizer.token_bytes(id); },
                       {"m/tokenizer.json: no token has the id " + std::to_string(id)});
    expect_input_error([&] { tokenizer.decode(Ids{65, id}); }, {std::to_string(id)});
    expect_input_error([&] { tokenizer.is_special(id); }, {std::to_string(id)});
    StreamDecoder decoder(tokenizer);
    EXPECT_EQ(decoder.push(0xe4), "");
    expect_input_error([&] { decoder.push(id); }, {std::to_string(id)});
    EXPECT_EQ(decoder.push(0xbd), "");
    EXPECT_EQ(decoder.push(0xa0), "\u4f60");
  }
}

TEST(TextTokenizer, RefusesTextThatIsNotUtf8) {
  const Tokenizer tokenizer = tiny_tiktoken(byte_ranks());
  const std::vector<std::pair<std::string, int>> broken = {
      {"\x80", 0},         {"ab\xff", 2},          {"\u4f60\xe4\xbd", 3},
      {"\xc0\x80", 0},     {"a\xed\xa0\x80", 1},   {"\xf4\x90\x80\x80", 0},
      {"\xe0\x9f\xbf", 0}, {"\xf0\x8f\xbf\xbf", 0}};
  for (const auto& [text, offset] : broken) {
    for (const bool parse_special : {false, true}) {
      expect_input_error([&, &bad = text] { tokenizer.encode(bad, parse_special); },
                         {"not valid UTF-8 at byte " + std::to_string(offset)});
    }
  }
  EXPECT_EQ(tokenizer.encode(std::string("\0\x7f", 2), false), (Ids{0, 0x7f}));
}

TEST(TextTokenizer, StreamsWholeCharactersOnly) {
  const Tokenizer tokenizer = tiny_tiktoken(byte_ranks());
  StreamDecoder decoder(tokenizer);
  std::vector<std::string> pieces;
  for (const unsigned char byte : std::string("a\xf0\x9f\x98\x80\xe4\xbdz\xff\xf0\x9f")) {
    pieces.push_back(decoder.push(byte));
  }
  EXPECT_EQ(pieces, (std::vector<std::string>{"a", "", "", "", "\U0001f600", "", "", "\ufffdz",
                                              "\ufffd", "", ""}));
  EXPECT_EQ(decoder.finish(), "\ufffd");
  EXPECT_EQ(decoder.finish(), "");
  EXPECT_EQ(decoder.push('b'), "b");
}

TEST(TextTokenizer, CutsLongTextsLikeKimi) {
  const LongTextLimits limits = {.max_characters = 10, .max_run = 4};
  using Parts = std::vector<std::string_view>;
  EXPECT_EQ(cut_long_text("abcd", limits), Parts{"abcd"});
  EXPECT_EQ(cut_long_text("abcde", limits), (Parts{"abcd", "e"}));
  EXPECT_EQ(cut_long_text("abc de     f", limits), (Parts{"abc de    ", " f"}));
  EXPECT_EQ(cut_long_text("\u00e4\u00e4\u00e4\u00e4\u00e4", limits),
            (Parts{"\u00e4\u00e4\u00e4\u00e4", "\u00e4"}));
  EXPECT_EQ(cut_long_text("ab ab ab ab ab ab ", limits), (Parts{"ab ab ab a", "b ab ab "}));
}

TEST(TextTokenizer, ReadsUtf8ByTheStandard) {
  std::string text;
  // Table 3-8 of the standard: each maximal subpart is replaced by one character.
  EXPECT_EQ(append_as_utf8("a\xf1\x80\x80\xe1\x80\xc2"
                           "b\x80"
                           "c\x80\xbf"
                           "d",
                           text),
            13U);
  EXPECT_EQ(text, "a\ufffd\ufffd\ufffdb\ufffdc\ufffd\ufffdd");
  EXPECT_EQ(read_utf8("\xf4\x8f\xbf\xbf").code_point, 0x10ffffU);
  EXPECT_EQ(find_invalid_utf8("\u00e4\U0001f600\xe2\x82"), 6U);
}

// A long piece is one merge problem: it must not take the square of its length.
TEST(TextTokenizer, MergesLongPieces) {
  const Tokenizer tiktoken = tiny_tiktoken(byte_ranks(kLonger + "YWJhYg== 259\n"));
  Json content = tiny_tokenizer_json();
  content["model"]["vocab"].update({{"ab", 256}, {"abab", 257}});
  content["model"]["merges"] = Json::array({"a b", "ab ab"});
  const Tokenizer json = parse_json_tokenizer(content);
  std::string text;
  for (int i = 0; i < 1'000'000; ++i) {
    text += "ab";
  }
  EXPECT_EQ(json.encode(text, false), Ids(500'000, 257));
  EXPECT_EQ(tiktoken.encode(text, false), Ids(500'000, 259));
}

// More words than the cache holds, of every length up to beyond those that it takes, twice.
TEST(TextTokenizer, CachedWordsAreThoseThatMergingGives) {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) {
    tokens.emplace_back(1, static_cast<char>(byte));
  }
  for (const char* token : {"12", "34", "123", "56", "99", "1234"}) {
    tokens.emplace_back(token);
  }
  BytePairs pairs;
  pairs.byte_ids.resize(256);
  std::iota(pairs.byte_ids.begin(), pairs.byte_ids.end(), 0);
  pairs.tokens = TokenMap({tokens.begin(), tokens.end()});
  pairs.whole_pieces = true;
  WordCache cache;
  BytePairScratch scratch;
  for (int number = 0; number < 160'000; ++number) {
    std::string word = std::to_string(number % 80'000);
    word.insert(0, static_cast<std::size_t>(number % 70), 'a');
    Ids expected = {7};
    pairs.encode(word, scratch, expected);
    Ids actual = {7};
    cache.encode(pairs, word, scratch, actual);
    ASSERT_EQ(actual, expected) << word;
    actual.resize(1);
    cache.encode(pairs, word, scratch, actual);
    ASSERT_EQ(actual, expected) << word << " again";
  }
}

}  // namespace
}  // namespace kdtree
