#include "text/long_text.h"

#include "text/utf8.h"

namespace kdtree {

namespace {

// Python also counts the four separators of ASCII.
bool is_python_space(char32_t code_point) {
  return is_white_space(code_point) || (code_point >= 0x1c && code_point <= 0x1f);
}

}  // namespace

std::vector<std::string_view> cut_long_text(std::string_view text, LongTextLimits limits) {
  // No more bytes than the limits allow characters: nothing to count.
  if (text.size() <= limits.max_run && text.size() <= limits.max_characters) {
    return {text};
  }
  std::vector<std::string_view> parts;
  std::size_t begin = 0;  // of the part
  std::size_t run = 0;    // characters of the run so far
  std::size_t index = 0;  // of the character, from the last cut at max_characters
  bool in_space = false;
  for (std::size_t at = 0; at < text.size(); ++index) {
    const Utf8Step step = read_utf8(text.substr(at));
    const bool is_space = is_python_space(step.code_point);
    const bool full = index == limits.max_characters;
    if (full || (is_space == in_space && run == limits.max_run)) {
      parts.push_back(text.substr(begin, at - begin));
      begin = at;
      run = 0;
      index = full ? 0 : index;
    }
    run = is_space == in_space ? run + 1 : 1;
    in_space = is_space;
    at += step.num_bytes;
  }
  parts.push_back(text.substr(begin));
  return parts;
}

}  // namespace kdtree
