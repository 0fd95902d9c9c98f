#include "text/added_tokens.h"

#include <algorithm>

#include "core/check.h"
#include "text/utf8.h"

namespace kdtree {

namespace {

// Where the white space that ends at `end` begins, not before `low`.
std::size_t white_space_before(std::string_view text, std::size_t low, std::size_t end) {
  while (end > low) {
    std::size_t begin = end - 1;
    while (begin > low && (static_cast<unsigned char>(text[begin]) & 0xc0U) == 0x80U) {
      --begin;
    }
    if (!is_white_space(read_utf8(text.substr(begin, end - begin)).code_point)) {
      break;
    }
    end = begin;
  }
  return end;
}

std::size_t white_space_behind(std::string_view text, std::size_t begin) {
  while (begin < text.size()) {
    const Utf8Step step = read_utf8(text.substr(begin));
    if (!is_white_space(step.code_point)) {
      break;
    }
    begin += step.num_bytes;
  }
  return begin;
}

}  // namespace

void AddedTokens::add(AddedToken token) {
  check(!token.content.empty(), "an added token without content");
  std::uint32_t node = 0;
  for (const char c : token.content) {
    const auto byte = static_cast<unsigned char>(c);
    std::uint32_t next = child(node, byte);
    if (next == 0) {
      next = static_cast<std::uint32_t>(nodes_.size());
      nodes_.emplace_back();
      nodes_[node].children.emplace_back(byte, next);
    }
    node = next;
  }
  check(nodes_[node].token_index < 0, "the added token '{}' twice", token.content);
  nodes_[node].token_index = static_cast<std::int32_t>(tokens_.size());
  begins_[static_cast<unsigned char>(token.content[0])] = true;
  tokens_.push_back(std::move(token));
}

std::uint32_t AddedTokens::child(std::uint32_t node, unsigned char byte) const {
  for (const auto& [label, next] : nodes_[node].children) {
    if (label == byte) {
      return next;
    }
  }
  return 0;
}

std::int32_t AddedTokens::longest_at(std::string_view rest) const {
  std::int32_t longest = -1;
  std::uint32_t node = 0;
  for (const char c : rest) {
    node = child(node, static_cast<unsigned char>(c));
    if (node == 0) {
      break;
    }
    if (nodes_[node].token_index >= 0) {
      longest = nodes_[node].token_index;
    }
  }
  return longest;
}

void AddedTokens::find_all(std::string_view text, std::vector<AddedTokenMatch>& matches) const {
  if (tokens_.empty()) {
    return;
  }
  std::size_t taken = 0;  // end of the last match, its white space included
  std::size_t at = 0;
  while (at < text.size()) {
    // Nearly no byte of a text begins a token.
    const bool may_begin = begins_[static_cast<unsigned char>(text[at])];
    const std::int32_t index = may_begin ? longest_at(text.substr(at)) : -1;
    if (index < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<std::size_t>(index)];
    TextRange range = {at, at + token.content.size()};
    if (token.lstrip) {
      range.begin = white_space_before(text, taken, range.begin);
    }
    if (token.rstrip) {
      range.end = white_space_behind(text, range.end);
    }
    matches.push_back({range, token.id});
    taken = at = range.end;
  }
}

}  // namespace kdtree
