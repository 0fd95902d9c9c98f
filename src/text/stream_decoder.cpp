#include "text/stream_decoder.h"

#include "text/utf8.h"

namespace kdtree {

std::string StreamDecoder::push(std::int32_t id) {
  held_ += tokenizer_->token_bytes(id);
  std::string text;
  held_.erase(0, append_as_utf8(held_, text));
  return text;
}

std::string StreamDecoder::finish() {
  std::string text = held_.empty() ? "" : "\xef\xbf\xbd";
  held_.clear();
  return text;
}

}  // namespace kdtree
