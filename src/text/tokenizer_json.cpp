// tokenizer.json, the format of Hugging Face's `tokenizers`
// (https://huggingface.co/docs/tokenizers): pre-tokenizers, byte-level BPE and added tokens.
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/json_text.h"
#include "text/byte_level.h"
#include "text/json_place.h"
#include "text/tokenizer.h"
#include "text/tokenizer_parts.h"

namespace kdtree {

namespace {

// The pattern of ByteLevel with "use_regex" (GPT-2).
constexpr const char* kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// From the spelling of a token in the file to its id.
using Spellings = std::unordered_map<std::string_view, std::int32_t>;

// --- Pre-tokenizers ---------------------------------------------------------------------------

void read_split(const JsonPlace& place, Splitter& splitter) {
  constexpr SplitBehavior kBehaviors[] = {
      SplitBehavior::kIsolated, SplitBehavior::kRemoved, SplitBehavior::kMergedWithPrevious,
      SplitBehavior::kMergedWithNext, SplitBehavior::kContiguous};
  const std::size_t behavior = place.choice(
      "behavior", {"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"});
  const JsonPlace pattern = place.at("pattern", "an object with Regex or String");
  const auto regex = pattern.find("Regex");
  const JsonPlace text = regex ? *regex : pattern.at("String", "a string, or the key Regex");
  splitter.add({Regex(regex ? text.text() : escape_for_regex(text.text()), text.where()),
                kBehaviors[behavior], place.flag_or("invert", false)});
}

void read_digits(const JsonPlace& place, Splitter& splitter) {
  const bool each = place.flag_or("individual_digits", false);
  splitter.add({Regex(R"(\p{N})", place.where()),
                each ? SplitBehavior::kIsolated : SplitBehavior::kContiguous});
}

void read_byte_level(const JsonPlace& place, Splitter& splitter) {
  place.require_absent_or("add_prefix_space", false);
  // What is absent is true to `tokenizers`.
  place.at("add_prefix_space", "false: nothing else is supported");
  if (place.flag_or("use_regex", true)) {
    splitter.add({Regex(kByteLevelPattern, place.where())});
  }
}

// The steps of a pre-tokenizer; `ends` becomes true with ByteLevel, behind which nothing may come:
// it replaces the text by its spelling.
void read_pre_tokenizer(const JsonPlace& place, Splitter& splitter, bool& ends) {
  if (ends) {
    place.refuse("no pre-tokenizer behind ByteLevel");
  }
  switch (place.choice("type", {"Sequence", "Split", "Digits", "ByteLevel"})) {
    case 0:
      for (const JsonPlace& step : place.at("pretokenizers", "a list").elements()) {
        read_pre_tokenizer(step, splitter, ends);
      }
      return;
    case 1:
      return read_split(place, splitter);
    case 2:
      return read_digits(place, splitter);
    default:
      read_byte_level(place, splitter);
      ends = true;
  }
}

// --- Vocabulary and merges --------------------------------------------------------------------

void set_token(const JsonPlace& place, std::int32_t id, std::string bytes, TokenKind kind,
               TokenizerParts& parts) {
  const auto at = static_cast<std::size_t>(id);
  if (at >= parts.tokens.size()) {
    parts.tokens.resize(at + 1);
    parts.kinds.resize(at + 1, TokenKind::kNone);
  }
  if (parts.kinds[at] != TokenKind::kNone) {
    place.refuse("an id that no other token has");
  }
  parts.tokens[at] = std::move(bytes);
  parts.kinds[at] = kind;
}

Spellings read_vocab(const JsonPlace& vocab, TokenizerParts& parts) {
  if (!vocab.value().is_object()) {
    vocab.refuse("an object of tokens and ids");
  }
  Spellings ids;
  ids.reserve(vocab.value().size());
  for (const auto& [spelling, value] : vocab.value().get_ref<const nlohmann::json::object_t&>()) {
    // The path is made for errors alone: this runs a hundred thousand times.
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() >= kMaxTokens) {
      vocab.at(spelling, "a token id").id();
    }
    const auto id = value.get<std::int32_t>();
    const auto at = static_cast<std::size_t>(id);
    if (at < parts.kinds.size() && parts.kinds[at] != TokenKind::kNone) {
      vocab.at(spelling, "a token id").refuse("an id that no other token has");
    }
    set_token(vocab, id, bytes_of_byte_level(spelling).value_or(spelling), TokenKind::kPlain,
              parts);
    ids.emplace(spelling, id);
  }
  for (unsigned byte = 0; byte < 256; ++byte) {
    const std::string spelling = byte_level_of_bytes(std::string(1, static_cast<char>(byte)));
    const auto found = ids.find(spelling);
    require_input(found != ids.end(),
                  "{} has no token '{}' for the byte 0x{:02x}, expected one for each of the 256",
                  vocab.where(), spelling, byte);
    parts.pairs.byte_ids.push_back(found->second);
  }
  return ids;
}

// Both published spellings: "a b" and ["a", "b"].
std::pair<std::string_view, std::string_view> read_pair(const JsonPlace& merges,
                                                        std::size_t index) {
  const nlohmann::json& value = merges.value()[index];
  if (value.is_string()) {
    const std::string_view text = value.get_ref<const std::string&>();
    const std::size_t blank = text.find(' ');
    if (blank != std::string_view::npos && text.find(' ', blank + 1) == std::string_view::npos) {
      return {text.substr(0, blank), text.substr(blank + 1)};
    }
  } else if (value.is_array() && value.size() == 2 && value[0].is_string() &&
             value[1].is_string()) {
    return {value[0].get_ref<const std::string&>(), value[1].get_ref<const std::string&>()};
  }
  merges.elements()[index].refuse("two tokens, as \"a b\" or [\"a\", \"b\"]");
}

void read_merges(const JsonPlace& merges, const Spellings& ids, MergeTable& table) {
  if (!merges.value().is_array()) {
    merges.refuse("a list of pairs of tokens");
  }
  const std::size_t count = merges.value().size();
  table.reset(count);
  std::string joined;
  for (std::size_t rank = 0; rank < count; ++rank) {
    const auto [left, right] = read_pair(merges, rank);
    joined.assign(left).append(right);
    const auto left_id = ids.find(left);
    const auto right_id = ids.find(right);
    const auto joined_id = ids.find(joined);
    if (left_id == ids.end() || right_id == ids.end() || joined_id == ids.end()) {
      merges.elements()[rank].refuse("two tokens that are in the vocabulary, joined as well");
    }
    const Merge merge = {static_cast<std::uint32_t>(rank), joined_id->second};
    if (!table.add(left_id->second, right_id->second, merge)) {
      merges.elements()[rank].refuse("a pair that is listed once");
    }
  }
}

Spellings read_model(const JsonPlace& model, TokenizerParts& parts) {
  model.choice("type", {"BPE"});
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    model.require_absent_or(key, "");
  }
  model.require_absent_or("byte_fallback", false);
  model.require_absent_or("dropout", 0.0);
  Spellings ids = read_vocab(model.at("vocab", "an object of tokens and ids"), parts);
  read_merges(model.at("merges", "a list of pairs of tokens"), ids, parts.pairs.merges);
  parts.pairs.by_merges = true;
  parts.pairs.whole_pieces = model.flag_or("ignore_merges", false);
  return ids;
}

// --- Added tokens -----------------------------------------------------------------------------

void read_added_token(const JsonPlace& place, const Spellings& ids, TokenizerParts& parts) {
  const std::int32_t id = place.at("id", "a token id").id();
  const JsonPlace text = place.at("content", "the text of the token");
  const std::string& content = text.text();
  if (content.empty()) {
    text.refuse("the text of the token");
  }
  place.require_absent_or("single_word", false);
  const TokenKind kind = place.flag_or("special", false) ? TokenKind::kSpecial : TokenKind::kAdded;
  if (!parts.added_ids.emplace(content, id).second) {
    text.refuse("a text that no other added token has");
  }
  if (const auto known = ids.find(content); known == ids.end()) {
    set_token(place.at("id", "a token id"), id, content, kind, parts);
  } else {
    if (known->second != id) {
      place.at("id", "a token id").refuse(fmt::format("{}, as in the vocabulary", known->second));
    }
    parts.tokens[static_cast<std::size_t>(id)] = content;
    parts.kinds[static_cast<std::size_t>(id)] = kind;
  }
  // Those that are "normalized" are searched for in the normalized text, after the others; there is
  // no normalizer, but the order remains.
  parts.added[place.flag_or("normalized", kind != TokenKind::kSpecial) ? 1 : 0].add(
      {.id = id,
       .content = content,
       .lstrip = place.flag_or("lstrip", false),
       .rstrip = place.flag_or("rstrip", false)});
}

// For "ignore_merges": what a piece may be as a whole. Tokens that are no spelled bytes, and added
// ones, are not: plain text never becomes a control token.
void map_whole_pieces(const Spellings& ids, TokenizerParts& parts) {
  std::vector<std::string_view> pieces(parts.tokens.size());
  for (const auto& [spelling, id] : ids) {
    const auto at = static_cast<std::size_t>(id);
    if (parts.kinds[at] == TokenKind::kPlain && bytes_of_byte_level(spelling)) {
      pieces[at] = parts.tokens[at];
    }
  }
  parts.pairs.tokens = TokenMap(std::move(pieces));
}

void require_no_normalizer(const JsonPlace& file) {
  const auto normalizer = file.find("normalizer");
  if (!normalizer) {
    return;
  }
  normalizer->choice("type", {"Sequence"});
  for (const JsonPlace& step : normalizer->at("normalizers", "a list").elements()) {
    step.refuse("nothing: normalizers are not supported");
  }
}

}  // namespace

Tokenizer parse_tokenizer_json(const NamedText& file) {
  const nlohmann::json json = parse_json(file.content, file.origin);
  const JsonPlace root(json, file.origin);
  auto parts = std::make_unique<TokenizerParts>();
  parts->origin = file.origin;
  require_no_normalizer(root);
  root.require_absent_or("truncation", nullptr);
  bool byte_level = false;
  const JsonPlace pre_tokenizer = root.at("pre_tokenizer", "one that ends with ByteLevel");
  read_pre_tokenizer(pre_tokenizer, parts->splitter, byte_level);
  if (!byte_level) {
    pre_tokenizer.refuse("one that ends with ByteLevel");
  }
  if (const auto decoder = root.find("decoder")) {
    decoder->choice("type", {"ByteLevel"});
  }
  const Spellings ids = read_model(root.at("model", "a BPE model"), *parts);
  if (const auto added = root.find("added_tokens")) {
    for (const JsonPlace& token : added->elements()) {
      read_added_token(token, ids, *parts);
    }
  }
  if (parts->pairs.whole_pieces) {
    map_whole_pieces(ids, *parts);
  }
  return Tokenizer(std::move(parts));
}

}  // namespace kdtree
