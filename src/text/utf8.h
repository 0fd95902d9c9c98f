// UTF-8 as table 3-7 of The Unicode Standard defines it: no surrogates, nothing overlong, nothing
// above U+10FFFF.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace kdtree {

enum class Utf8Kind {
  kCharacter,   // a whole character
  kInvalid,     // bytes that begin no character, whatever follows
  kIncomplete,  // the text ends inside of what may become a character
};

struct Utf8Step {
  Utf8Kind kind = Utf8Kind::kCharacter;
  // Bytes of the character, or those that one U+FFFD stands for (a "maximal subpart" in the
  // standard's words, section 3.9), or those at hand of an incomplete character.
  std::size_t num_bytes = 1;
  char32_t code_point = 0;  // of kCharacter only
};

// What `rest`, which must not be empty, begins with.
Utf8Step read_utf8(std::string_view rest);

// The offset in bytes of the first byte that is no part of a character, npos if there is none.
std::size_t find_invalid_utf8(std::string_view text);

// Appends what `bytes` begin with to `text`: characters as they are, U+FFFD for what is none.
// Returns the number of bytes consumed: all but an incomplete character at the end.
std::size_t append_as_utf8(std::string_view bytes, std::string& text);

// The property White_Space of Unicode.
bool is_white_space(char32_t code_point);

}  // namespace kdtree
