// Regular expressions over UTF-8 as tokenizers use them: Oniguruma in its own syntax, which knows
// Unicode properties, lookahead and the intersection of classes.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

struct re_pattern_buffer;  // Oniguruma's compiled pattern

namespace kdtree {

// Bytes [begin, end) of a text.
struct TextRange {
  std::size_t begin = 0;
  std::size_t end = 0;
  bool operator==(const TextRange&) const = default;
};

class Regex {
 public:
  // InputError, beginning with `origin` (file and key), if `pattern` does not compile.
  Regex(std::string_view pattern, const std::string& origin);

  // Appends the matches in `text`, which must be valid UTF-8, from left to right; none overlap. A
  // match may be empty, but not where the one before it ended. Several threads may search with one
  // object. InputError, naming the offset in bytes, if the search gives up (Oniguruma limits the
  // steps that one match may take back).
  void find_all(std::string_view text, std::vector<TextRange>& matches) const;

 private:
  struct Release {
    void operator()(re_pattern_buffer* pattern) const;
  };
  std::unique_ptr<re_pattern_buffer, Release> pattern_;
  std::string origin_;
};

// `text` as a pattern that matches it and nothing else.
std::string escape_for_regex(std::string_view text);

}  // namespace kdtree
