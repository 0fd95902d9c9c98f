// How Kimi's published tokenizer cuts long texts before it encodes them, part by part. A cut can
// change ids, so whoever wants the same ids cuts at the same places.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace kdtree {

struct LongTextLimits {
  std::size_t max_characters = 400'000;  // of a part
  std::size_t max_run = 25'000;          // of characters that all are white space, or all are not
};

// The parts of `text`, valid UTF-8, in order; together they are the text. White space is what
// Python's str.isspace says. First the text is cut every `max_characters`, then each part wherever
// a run gets longer than `max_run`.
std::vector<std::string_view> cut_long_text(std::string_view text, LongTextLimits limits = {});

}  // namespace kdtree
