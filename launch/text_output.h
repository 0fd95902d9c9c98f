// Text in and out of kdtree generate: the tokenizer of a checkpoint, its end tokens, outputs as
// text.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "config/model_config.h"
#include "engine/request.h"
#include "text/chat_template.h"
#include "text/stream_decoder.h"
#include "text/tokenizer.h"
#include "weights/checkpoint.h"

namespace kdtree {

// Where the tokenizer of the checkpoint `model` is: `chosen` (--tokenizer) if it is not empty, else
// the checkpoint's directory. InputError if there is none: a KDTR bundle holds no tokenizer.
std::string find_tokenizer(const std::string& model, const std::string& chosen);

class TextModel {
 public:
  // Loads the tokenizer that find_tokenizer finds. InputError if it is malformed, or has ids that
  // the embedding of `config` has no row for.
  TextModel(const std::string& model, const std::string& chosen, const ModelConfig& config);

  // The ids of a text, behind the begin token where the tokenizer asks for one. InputError begins
  // with `origin`: a text without tokens, or not valid UTF-8.
  std::vector<std::int32_t> encode_prompt(const std::string& text, const std::string& origin,
                                          bool parse_special) const;

  // The ids of a conversation (render_chat).
  std::vector<std::int32_t> encode_conversation(const Chat& chat, ChatTemplate chat_template,
                                                bool thinking) const;

  // The text of an output, valid UTF-8, without the end token behind it. An id that the embedding
  // has but the tokenizer has not is U+FFFD.
  std::string decode(std::span<const std::int32_t> ids,
                     const std::vector<std::int64_t>& end_ids) const;

  const Tokenizer& tokenizer() const { return tokenizer_; }

 private:
  Tokenizer tokenizer_;
  std::vector<std::int32_t> begin_ids_;  // none or one
};

// The template of that name; for "auto" that of the checkpoint's model_type. InputError where that
// does not tell: DeepSeek-V3 and R1 share theirs, so do K2-Instruct and K2-Thinking.
ChatTemplate choose_chat_template(const std::string& name, const TargetCheckpoint& target);

// The text of one sequence as it is decoded; joined, it is what TextModel::decode gives.
class TextStream {
 public:
  // The model outlives the stream.
  TextStream(const TextModel& model, std::vector<std::int64_t> end_ids)
      : decoder_(model.tokenizer()), end_ids_(std::move(end_ids)) {}

  // What is certain by now: whole characters.
  std::string push(const TokenUpdate& update);

 private:
  StreamDecoder decoder_;
  std::vector<std::int64_t> end_ids_;
};

// Adds to config.eos_token_ids what else ends a turn: eos_token_id of generation_config.json in the
// directory `model`, if it is there, and the end tokens that `text` (may be null) has by name.
// InputError for an eos_token_id that is neither an id nor a list of ids.
void add_end_tokens(const std::string& model, const TextModel* text, ModelConfig& config);

}  // namespace kdtree
