// tiktoken.model: a line a token, "base64 rank" (https://github.com/openai/tiktoken, load.py). The
// split pattern and the added tokens are those of Kimi K2's tokenization_kimi.py.
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/json_text.h"
#include "text/json_place.h"
#include "text/tokenizer.h"
#include "text/tokenizer_parts.h"

namespace kdtree {

namespace {

constexpr std::int32_t kNumAddedTokens = 256;

// Alternatives in their order: Chinese runs; words that end in lower case, and words in upper case,
// each with one character before them and an English contraction behind; up to three digits;
// punctuation with line ends; line ends; white space up to the last blank before a word; the rest.
constexpr const char* kKimiPattern =
    R"([\p{Han}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*)"
    R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+)"
    R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+)"
    R"(|\s+(?!\S))"
    R"(|\s+)";

// -1 for what is no digit of base64.
int value_of_base64(char c) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const std::size_t value = kDigits.find(c);
  return value == std::string_view::npos ? -1 : static_cast<int>(value);
}

// RFC 4648 with padding; none if `text` is anything else.
std::optional<std::string> decode_base64(std::string_view text) {
  if (text.size() % 4 != 0) {
    return std::nullopt;
  }
  std::size_t padding = 0;
  while (padding < 2 && padding < text.size() && text[text.size() - 1 - padding] == '=') {
    ++padding;
  }
  std::string bytes;
  std::uint32_t bits = 0;
  int num_bits = 0;
  for (const char c : text.substr(0, text.size() - padding)) {
    const int value = value_of_base64(c);
    if (value < 0) {
      return std::nullopt;
    }
    bits = bits << 6U | static_cast<std::uint32_t>(value);
    num_bits += 6;
    if (num_bits >= 8) {
      num_bits -= 8;
      bytes += static_cast<char>(bits >> static_cast<unsigned>(num_bits) & 0xffU);
    }
  }
  const std::uint32_t unused = bits & ((1U << static_cast<unsigned>(num_bits)) - 1U);
  return unused == 0 ? std::optional(bytes) : std::nullopt;
}

struct RankTable {
  std::vector<std::string> tokens;   // by rank, bytes
  std::vector<std::size_t> line_of;  // by rank, the line that gave it; 0 for none
};

void read_line(std::string_view line, std::size_t number, const std::string& origin,
               RankTable& table) {
  const std::size_t blank = line.find(' ');
  require_input(blank != std::string_view::npos,
                "{}: line {} is '{}', expected a token in base64, a blank and its rank", origin,
                number, line);
  const auto bytes = decode_base64(line.substr(0, blank));
  require_input(bytes.has_value() && !bytes->empty(),
                "{}: line {}: the token is '{}', expected base64 of at least one byte", origin,
                number, line.substr(0, blank));
  const std::string_view digits = line.substr(blank + 1);
  std::int32_t rank = -1;
  const auto [end, status] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  const bool good = status == std::errc() && end == digits.data() + digits.size() && rank >= 0 &&
                    rank < kMaxTokens - kNumAddedTokens;
  require_input(good, "{}: line {}: the rank is '{}', expected a number from 0 to {}", origin,
                number, digits, kMaxTokens - kNumAddedTokens - 1);
  const auto at = static_cast<std::size_t>(rank);
  if (at >= table.tokens.size()) {
    table.tokens.resize(at + 1);
    table.line_of.resize(at + 1);
  }
  require_input(table.line_of[at] == 0, "{}: line {}: line {} has the rank {} already", origin,
                number, table.line_of[at], rank);
  table.tokens[at] = *bytes;
  table.line_of[at] = number;
}

RankTable read_ranks(const NamedText& file) {
  RankTable table;
  std::string_view rest = file.content;
  for (std::size_t number = 1; !rest.empty(); ++number) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (!line.empty() && line.back() == '\r') {
      line.remove_suffix(1);
    }
    if (!line.empty()) {
      read_line(line, number, file.origin, table);
    }
  }
  for (std::size_t rank = 0; rank < table.tokens.size(); ++rank) {
    require_input(table.line_of[rank] != 0,
                  "{}: no line has the rank {}, expected all from 0 to the highest, {}",
                  file.origin, rank, table.tokens.size() - 1);
  }
  return table;
}

// The maps from bytes to ranks. From here on parts.tokens must keep its strings where they are.
void map_tokens(const std::vector<std::size_t>& line_of, TokenizerParts& parts) {
  const auto first_added = parts.tokens.begin() + static_cast<std::ptrdiff_t>(line_of.size());
  std::int64_t duplicate = -1;
  parts.pairs.tokens = TokenMap({parts.tokens.begin(), first_added}, &duplicate);
  if (duplicate >= 0) {
    const auto at = static_cast<std::size_t>(duplicate);
    const auto first = static_cast<std::size_t>(parts.pairs.tokens.find(parts.tokens[at]));
    fail_input("{}: lines {} and {} have the same token, expected it once", parts.origin,
               line_of[first], line_of[at]);
  }
  for (unsigned byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    const std::int32_t id = parts.pairs.tokens.find({&c, 1});
    require_input(id >= 0, "{}: no token is the byte 0x{:02x}, expected one for each of the 256",
                  parts.origin, byte);
    parts.pairs.byte_ids.push_back(id);
  }
}

// Names of the ids behind the ranks, from added_tokens_decoder or by default.
void add_tokens(std::int32_t num_ranks, const NamedText& file, TokenizerParts& parts) {
  const nlohmann::json json = parse_json(file.content, file.origin);
  const JsonPlace all =
      JsonPlace(json, file.origin).at("added_tokens_decoder", "an object of token ids and tokens");
  const std::int32_t end = num_ranks + kNumAddedTokens;
  for (std::int32_t id = num_ranks; id < end; ++id) {
    parts.tokens.push_back(fmt::format("<|reserved_token_{}|>", id));
    parts.kinds.push_back(TokenKind::kSpecial);
  }
  if (!all.value().is_object()) {
    all.refuse("an object of token ids and tokens");
  }
  for (const auto& [key, ignored] : all.value().items()) {
    std::int32_t id = -1;
    const auto [stop, status] = std::from_chars(key.data(), key.data() + key.size(), id);
    require_input(
        status == std::errc() && stop == key.data() + key.size() && id >= num_ranks && id < end,
        "{} has the id '{}', expected ids from {}, the number of ranks, to {}", all.where(), key,
        num_ranks, end - 1);
    const JsonPlace token = all.at(key, "a token");
    for (const char* flag : {"lstrip", "rstrip", "single_word"}) {
      token.require_absent_or(flag, false);  // tiktoken knows no such thing
    }
    const JsonPlace content = token.at("content", "the text of the token");
    if (content.text().empty()) {
      content.refuse("the text of the token");
    }
    parts.tokens[static_cast<std::size_t>(id)] = content.text();
    parts.kinds[static_cast<std::size_t>(id)] =
        token.flag_or("special", false) ? TokenKind::kSpecial : TokenKind::kAdded;
  }
  for (std::int32_t id = num_ranks; id < end; ++id) {
    const std::string& content = parts.tokens[static_cast<std::size_t>(id)];
    const auto [other, is_new] = parts.added_ids.emplace(content, id);
    require_input(is_new, "{}: ids {} and {} are both '{}', expected texts that differ",
                  all.where(), other->second, id, content);
    parts.added[0].add({.id = id, .content = content});
  }
}

}  // namespace

Tokenizer parse_tiktoken(const NamedText& ranks, const NamedText& config) {
  auto parts = std::make_unique<TokenizerParts>();
  parts->origin = ranks.origin;
  RankTable table = read_ranks(ranks);
  require_input(!table.tokens.empty(), "{}: no line holds a token and its rank", ranks.origin);
  parts->tokens = std::move(table.tokens);
  parts->kinds.assign(parts->tokens.size(), TokenKind::kPlain);
  add_tokens(static_cast<std::int32_t>(parts->tokens.size()), config, *parts);
  map_tokens(table.line_of, *parts);
  parts->pairs.whole_pieces = true;
  parts->splitter.add({Regex(kKimiPattern, ranks.origin)});
  parts->cuts_long_texts = true;
  return Tokenizer(std::move(parts));
}

}  // namespace kdtree
