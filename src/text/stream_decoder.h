// Tokens to text as they come.
#pragma once

#include <cstdint>
#include <string>

#include "text/tokenizer.h"

namespace kdtree {

// Each call gives the text that is certain by now, always valid UTF-8: the bytes of a character
// that later tokens may complete are held back, and each sequence that begins no character becomes
// one U+FFFD. Joined, the texts do not depend on where tokens end.
class StreamDecoder {
 public:
  // Does not own the tokenizer.
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}

  // InputError, changing nothing, for an id outside of the vocabulary.
  std::string push(std::int32_t id);

  // The rest: U+FFFD if bytes are held back, else empty. Afterwards a new text may begin.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  std::string held_;  // an incomplete character, up to 3 bytes
};

}  // namespace kdtree
