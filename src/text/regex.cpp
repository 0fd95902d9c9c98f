#include "text/regex.h"

#include <oniguruma.h>

#include <array>
#include <mutex>

#include "core/check.h"
#include "text/utf8.h"

namespace kdtree {

namespace {

const OnigUChar* bytes_of(std::string_view text) {
  return reinterpret_cast<const OnigUChar*>(text.data());
}

// The library's tables are set up once, before the first pattern.
void initialize_once() {
  static std::once_flag once;
  std::call_once(once, [] {
    std::array<OnigEncoding, 1> encodings = {ONIG_ENCODING_UTF8};
    const int status = onig_initialize(encodings.data(), static_cast<int>(encodings.size()));
    check(status == ONIG_NORMAL, "Oniguruma does not start: {}", status);
  });
}

std::string describe_status(int status, OnigErrorInfo* info = nullptr) {
  std::array<OnigUChar, ONIG_MAX_ERROR_MESSAGE_LEN> text{};
  const int length = info == nullptr ? onig_error_code_to_str(text.data(), status)
                                     : onig_error_code_to_str(text.data(), status, info);
  return {reinterpret_cast<const char*>(text.data()), static_cast<std::size_t>(length)};
}

// Where a search puts its result; kept by each thread, as a search a word would else allocate.
struct Region {
  Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { onig_region_free(&value, 0); }
  OnigRegion value{};
};

}  // namespace

void Regex::Release::operator()(re_pattern_buffer* pattern) const {
  onig_free(pattern);
}

Regex::Regex(std::string_view pattern, const std::string& origin) : origin_(origin) {
  initialize_once();
  const std::size_t invalid = find_invalid_utf8(pattern);
  require_input(invalid == std::string_view::npos,
                "{}: the pattern is not valid UTF-8 at byte {} of it", origin, invalid);
  OnigErrorInfo info{};
  OnigRegex compiled = nullptr;
  const OnigUChar* begin = bytes_of(pattern);
  const int status = onig_new(&compiled, begin, begin + pattern.size(), ONIG_OPTION_NONE,
                              ONIG_ENCODING_UTF8, ONIG_SYNTAX_ONIGURUMA, &info);
  pattern_.reset(compiled);
  require_input(status == ONIG_NORMAL, "{}: '{}' is no regular expression of Oniguruma: {}", origin,
                pattern, describe_status(status, &info));
}

void Regex::find_all(std::string_view text, std::vector<TextRange>& matches) const {
  thread_local Region region;
  const OnigUChar* begin = bytes_of(text);
  const OnigUChar* end = begin + text.size();
  const std::size_t first = matches.size();
  std::size_t from = 0;
  while (from <= text.size()) {
    const int status =
        onig_search(pattern_.get(), begin, end, begin + from, end, &region.value, ONIG_OPTION_NONE);
    if (status == ONIG_MISMATCH) {
      return;
    }
    require_input(status >= 0, "{}: the pattern gives up on the text behind its byte {}: {}",
                  origin_, from, status < 0 ? describe_status(status) : "");
    const TextRange match = {static_cast<std::size_t>(region.value.beg[0]),
                             static_cast<std::size_t>(region.value.end[0])};
    const bool again =
        match.begin == match.end && matches.size() > first && matches.back().end == match.end;
    if (again) {  // the empty rest of the last match: look from the next character on
      from += from < text.size() ? read_utf8(text.substr(from)).num_bytes : 1;
    } else {
      matches.push_back(match);
      from = match.end;
    }
  }
}

std::string escape_for_regex(std::string_view text) {
  std::string pattern;
  for (const char c : text) {
    if (std::string_view("\\.+*?()|[]{}^$#&-~/ ").find(c) != std::string_view::npos) {
      pattern += '\\';
    }
    pattern += c;
  }
  return pattern;
}

}  // namespace kdtree
