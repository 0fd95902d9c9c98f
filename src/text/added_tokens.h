// Tokens that are found in a text before it is split: control tokens such as "<|im_end|>".
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/regex.h"

namespace kdtree {

struct AddedToken {
  std::int32_t id = 0;
  std::string content;  // UTF-8, not empty
  // Whether white space before or behind it becomes a part of it.
  bool lstrip = false;
  bool rstrip = false;
};

struct AddedTokenMatch {
  TextRange range;  // with the white space that the token takes in
  std::int32_t id = 0;
};

class AddedTokens {
 public:
  // The contents of all tokens must differ.
  void add(AddedToken token);

  // Appends the tokens in `text` from left to right. Of those that begin at one place the longest
  // is taken, and the search goes on behind it.
  void find_all(std::string_view text, std::vector<AddedTokenMatch>& matches) const;

  bool empty() const { return tokens_.empty(); }

 private:
  // A tree of bytes; node 0 is the root.
  struct Node {
    std::vector<std::pair<unsigned char, std::uint32_t>> children;  // byte, node
    std::int32_t token_index = -1;                                  // of the token that ends here
  };
  std::uint32_t child(std::uint32_t node, unsigned char byte) const;  // 0 if there is none
  // Index of the longest token at the front of `rest`, -1 if there is none.
  std::int32_t longest_at(std::string_view rest) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_{1};
  std::array<bool, 256> begins_{};  // whether a token begins with this byte
};

}  // namespace kdtree
