#include "text/tokenizer.h"

#include <utility>

#include "core/check.h"
#include "text/long_text.h"
#include "text/tokenizer_parts.h"
#include "text/utf8.h"

namespace kdtree {

namespace {

// One call of encode.
class Encoding {
 public:
  Encoding(const TokenizerParts& parts, WordCache& cache) : parts_(parts), cache_(cache) {}

  // `stage` counts the added tokens that are searched for already: all for plain text.
  void add(std::string_view text, std::size_t stage) {
    if (stage == parts_.added.size()) {
      add_plain(text);
      return;
    }
    std::vector<AddedTokenMatch> matches;
    parts_.added.at(stage).find_all(text, matches);
    std::size_t begin = 0;
    for (const AddedTokenMatch& match : matches) {
      add(text.substr(begin, match.range.begin - begin), stage + 1);
      ids_.push_back(match.id);
      begin = match.range.end;
    }
    add(text.substr(begin), stage + 1);
  }

  std::vector<std::int32_t> take() { return std::move(ids_); }

 private:
  void add_plain(std::string_view text) {
    parts_.splitter.split(text, pieces_);
    for (const TextRange& piece : pieces_) {
      cache_.encode(parts_.pairs, text.substr(piece.begin, piece.end - piece.begin), scratch_,
                    ids_);
    }
  }

  const TokenizerParts& parts_;
  WordCache& cache_;
  BytePairScratch scratch_;
  std::vector<TextRange> pieces_;
  std::vector<std::int32_t> ids_;
};

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<TokenizerParts> parts) : parts_(std::move(parts)) {
  check(parts_->tokens.size() == parts_->kinds.size() && parts_->pairs.byte_ids.size() == 256,
        "an incomplete tokenizer");
}

Tokenizer::Tokenizer(Tokenizer&& other) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&& other) noexcept = default;
Tokenizer::~Tokenizer() = default;

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool parse_special) const {
  require_input(text.size() <= INT32_MAX, "a text of {} bytes to encode, expected less than 2 GiB",
                text.size());
  const std::size_t invalid = find_invalid_utf8(text);
  require_input(invalid == std::string_view::npos,
                "the text to encode is not valid UTF-8 at byte {}", invalid);
  const std::unique_lock lock(parts_->cache_mutex, std::try_to_lock);
  WordCache own;
  Encoding encoding(*parts_, lock.owns_lock() ? parts_->cache : own);
  const std::size_t stage = parse_special ? 0 : parts_->added.size();
  if (parts_->cuts_long_texts) {
    for (const std::string_view part : cut_long_text(text)) {
      encoding.add(part, stage);
    }
  } else {
    encoding.add(text, stage);
  }
  return encoding.take();
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string bytes;
  for (const std::int32_t id : ids) {
    bytes += token_bytes(id);
  }
  return bytes;
}

std::string_view Tokenizer::token_bytes(std::int32_t id) const {
  require_input(id >= 0 && id < vocab_size(), "{}: no token has the id {}, expected 0 to {}",
                origin(), id, vocab_size() - 1);
  const auto at = static_cast<std::size_t>(id);
  require_input(parts_->kinds[at] != TokenKind::kNone, "{}: no token has the id {}", origin(), id);
  return parts_->tokens[at];
}

std::int32_t Tokenizer::vocab_size() const {
  return static_cast<std::int32_t>(parts_->tokens.size());
}

bool Tokenizer::is_special(std::int32_t id) const {
  token_bytes(id);
  return parts_->kinds[static_cast<std::size_t>(id)] == TokenKind::kSpecial;
}

std::optional<std::int32_t> Tokenizer::find_added(std::string_view text) const {
  const auto found = parts_->added_ids.find(std::string(text));
  return found == parts_->added_ids.end() ? std::nullopt : std::optional(found->second);
}

std::vector<std::int32_t> Tokenizer::added_ids(std::span<const std::string> texts) const {
  std::vector<std::int32_t> ids;
  for (const std::string& text : texts) {
    const auto id = find_added(text);
    require_input(id.has_value(), "{}: no added token is '{}'", origin(), text);
    ids.push_back(*id);
  }
  return ids;
}

const std::string& Tokenizer::origin() const {
  return parts_->origin;
}

}  // namespace kdtree
