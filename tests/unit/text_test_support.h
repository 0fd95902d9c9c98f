// What the tests of the tokenizers share: small vocabularies and the cases beside them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/unit/weights_test_support.h"
#include "text/byte_level.h"
#include "text/stream_decoder.h"
#include "text/tokenizer.h"

namespace kdtree {

using Ids = std::vector<std::int32_t>;

// Something below tests/data/tokenizer.
inline std::string tokenizer_path(const std::string& name) {
  const char* source = std::getenv("KDTREE_SOURCE");
  return (source == nullptr ? "" : std::string(source) + "/") + "tests/data/tokenizer/" + name;
}

inline std::vector<nlohmann::json> read_json_lines(const std::string& path) {
  std::istringstream lines(read_file(path));
  std::vector<nlohmann::json> all;
  for (std::string line; std::getline(lines, line);) {
    all.push_back(nlohmann::json::parse(line));
  }
  return all;
}

// As tests/reference/tokenizer_cases.py has it.
inline std::string digest_of(const Ids& ids) {
  std::uint64_t value = 0xcbf29ce484222325U;
  for (const std::int32_t id : ids) {
    value = (value ^ static_cast<std::uint64_t>(id)) * 0x100000001b3U;
  }
  return fmt::format("{:016x}", value);
}

inline std::string stream_decode(const Tokenizer& tokenizer, const Ids& ids) {
  StreamDecoder decoder(tokenizer);
  std::string text;
  for (const std::int32_t id : ids) {
    text += decoder.push(id);
  }
  return text + decoder.finish();
}

// One line of cases.jsonl: a text and its ids (or their number and digest), or ids and their text.
inline void expect_case(const Tokenizer& tokenizer, const nlohmann::json& line) {
  if (line.contains("decode")) {
    EXPECT_EQ(stream_decode(tokenizer, line["decode"].get<Ids>()), line["text"].get<std::string>())
        << line;
    return;
  }
  std::string text;
  if (line.contains("parts")) {
    for (const nlohmann::json& part : line["parts"]) {
      for (int i = 0; i < part[1].get<int>(); ++i) {
        text += part[0].get<std::string>();
      }
    }
  } else {
    text = line["text"].get<std::string>();
  }
  const Ids ids = tokenizer.encode(text, line["special"].get<bool>());
  if (line.contains("digest")) {
    EXPECT_EQ(ids.size(), line["num_ids"].get<std::size_t>()) << line;
    EXPECT_EQ(digest_of(ids), line["digest"].get<std::string>()) << line;
  } else {
    EXPECT_EQ(ids, line["ids"].get<Ids>()) << line;
  }
}

// The lines of a tiktoken vocabulary: the 256 bytes in order, then `longer` ("aGk= 256\n").
inline std::string byte_ranks(const std::string& longer = "") {
  constexpr const char* kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string lines;
  for (unsigned byte = 0; byte < 256; ++byte) {
    lines += fmt::format("{}{}== {}\n", kDigits[byte >> 2U], kDigits[(byte & 3U) << 4U], byte);
  }
  return lines + longer;
}

inline Tokenizer tiny_tiktoken(const std::string& ranks,
                               const std::string& config = R"({"added_tokens_decoder": {}})") {
  return parse_tiktoken({"m/tiktoken.model", ranks}, {"m/tokenizer_config.json", config});
}

// A tokenizer.json of the 256 bytes, whose ids are their values, and nothing else.
inline nlohmann::json tiny_tokenizer_json() {
  nlohmann::json vocab = nlohmann::json::object();
  for (int byte = 0; byte < 256; ++byte) {
    vocab[byte_level_of_bytes(std::string(1, static_cast<char>(byte)))] = byte;
  }
  return {
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::json::array()}}}};
}

inline Tokenizer parse_json_tokenizer(const nlohmann::json& content) {
  return parse_tokenizer_json({"m/tokenizer.json", content.dump()});
}

}  // namespace kdtree
