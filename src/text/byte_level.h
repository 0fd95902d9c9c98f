// The alphabet of byte-level vocabularies (GPT-2): a vocabulary in JSON cannot hold bytes, so each
// byte is spelled as a printable character. Printable Latin-1 stands for itself, the 68 other bytes
// for U+0100 and what follows it, in order ("Ġ", U+0120, is a blank).
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kdtree {

// The bytes that `spelled` (UTF-8) stands for; none if a character is not of the alphabet.
std::optional<std::string> bytes_of_byte_level(std::string_view spelled);

// How a vocabulary spells `bytes`.
std::string byte_level_of_bytes(std::string_view bytes);

}  // namespace kdtree
