// What the loaders put together and Tokenizer works with.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "text/added_tokens.h"
#include "text/byte_pairs.h"
#include "text/splitter.h"

namespace kdtree {

// No vocabulary is near it: a higher id is a mistake, not a reason to allocate.
constexpr std::int32_t kMaxTokens = 1 << 24;

enum class TokenKind : std::uint8_t { kNone, kPlain, kAdded, kSpecial };

struct TokenizerParts {
  std::string origin;
  // By id, both of one length. An id without a token has the kind kNone.
  std::vector<std::string> tokens;  // bytes
  std::vector<TokenKind> kinds;
  std::unordered_map<std::string, std::int32_t> added_ids;
  // Searched for one after the other: those of the second only in what the first leaves.
  std::array<AddedTokens, 2> added;
  Splitter splitter;
  BytePairs pairs;
  bool cuts_long_texts = false;  // see long_text.h

  // Of the calls that find it free; the others do without.
  std::mutex cache_mutex;
  WordCache cache;
};

}  // namespace kdtree
