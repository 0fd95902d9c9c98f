#include "text/utf8.h"

namespace kdtree {

namespace {

struct ByteBounds {
  unsigned char low = 0x80;
  unsigned char high = 0xbf;
};

// Of the second byte: the only one whose bounds depend on the first.
ByteBounds second_byte_bounds(unsigned char lead) {
  switch (lead) {
    case 0xe0:
      return {0xa0, 0xbf};
    case 0xed:
      return {0x80, 0x9f};
    case 0xf0:
      return {0x90, 0xbf};
    case 0xf4:
      return {0x80, 0x8f};
    default:
      return {};
  }
}

std::size_t length_by_lead(unsigned char lead) {
  if (lead < 0xc2 || lead > 0xf4) {
    return 0;
  }
  return lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

}  // namespace

Utf8Step read_utf8(std::string_view rest) {
  const auto lead = static_cast<unsigned char>(rest[0]);
  if (lead < 0x80) {
    return {Utf8Kind::kCharacter, 1, lead};
  }
  const std::size_t length = length_by_lead(lead);
  if (length == 0) {
    return {Utf8Kind::kInvalid, 1, 0};
  }
  char32_t code_point = lead & (0x7fU >> length);
  ByteBounds bounds = second_byte_bounds(lead);
  for (std::size_t i = 1; i < length; ++i) {
    if (i == rest.size()) {
      return {Utf8Kind::kIncomplete, i, 0};
    }
    const auto byte = static_cast<unsigned char>(rest[i]);
    if (byte < bounds.low || byte > bounds.high) {
      return {Utf8Kind::kInvalid, i, 0};
    }
    code_point = code_point << 6U | (byte & 0x3fU);
    bounds = {};
  }
  return {Utf8Kind::kCharacter, length, code_point};
}

std::size_t find_invalid_utf8(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    const Utf8Step step = read_utf8(text.substr(at));
    if (step.kind != Utf8Kind::kCharacter) {
      return at;
    }
    at += step.num_bytes;
  }
  return std::string_view::npos;
}

std::size_t append_as_utf8(std::string_view bytes, std::string& text) {
  std::size_t at = 0;
  while (at < bytes.size()) {
    const Utf8Step step = read_utf8(bytes.substr(at));
    if (step.kind == Utf8Kind::kIncomplete) {
      break;
    }
    if (step.kind == Utf8Kind::kCharacter) {
      text += bytes.substr(at, step.num_bytes);
    } else {
      text += "\xef\xbf\xbd";
    }
    at += step.num_bytes;
  }
  return at;
}

bool is_white_space(char32_t code_point) {
  return (code_point >= 0x9 && code_point <= 0xd) || code_point == 0x20 || code_point == 0x85 ||
         code_point == 0xa0 || code_point == 0x1680 ||
         (code_point >= 0x2000 && code_point <= 0x200a) || code_point == 0x2028 ||
         code_point == 0x2029 || code_point == 0x202f || code_point == 0x205f ||
         code_point == 0x3000;
}

}  // namespace kdtree
