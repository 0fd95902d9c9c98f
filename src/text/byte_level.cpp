#include "text/byte_level.h"

#include <array>

#include "text/utf8.h"

namespace kdtree {

namespace {

struct Alphabet {
  std::array<char32_t, 256> character{};  // of every byte
  std::array<int, 324> byte{};            // of every character, -1 for none
};

bool stands_for_itself(unsigned value) {
  return (value >= 0x21 && value <= 0x7e) || (value >= 0xa1 && value <= 0xac) ||
         (value >= 0xae && value <= 0xff);
}

const Alphabet& alphabet() {
  static const Alphabet kTable = [] {
    Alphabet table;
    table.byte.fill(-1);
    char32_t next = 0x100;
    for (unsigned value = 0; value < 256; ++value) {
      const char32_t character = stands_for_itself(value) ? value : next++;
      table.character[value] = character;
      table.byte[character] = static_cast<int>(value);
    }
    return table;
  }();
  return kTable;
}

}  // namespace

std::optional<std::string> bytes_of_byte_level(std::string_view spelled) {
  const Alphabet& table = alphabet();
  std::string bytes;
  while (!spelled.empty()) {
    const Utf8Step step = read_utf8(spelled);
    if (step.kind != Utf8Kind::kCharacter || step.code_point >= table.byte.size() ||
        table.byte[step.code_point] < 0) {
      return std::nullopt;
    }
    bytes += static_cast<char>(table.byte[step.code_point]);
    spelled.remove_prefix(step.num_bytes);
  }
  return bytes;
}

std::string byte_level_of_bytes(std::string_view bytes) {
  std::string spelled;
  for (const char c : bytes) {
    const char32_t character = alphabet().character[static_cast<unsigned char>(c)];
    if (character < 0x80) {
      spelled += static_cast<char>(character);
    } else {  // all others are below U+0144: two bytes
      spelled += static_cast<char>(0xc0U | (character >> 6U));
      spelled += static_cast<char>(0x80U | (character & 0x3fU));
    }
  }
  return spelled;
}

}  // namespace kdtree
