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

// The model's tokenizer and the text that begins its prompts.
struct TokenizerSource {
  // The directory or file `chosen` (--tokenizer) if it is not empty, else the model's own `files`.
  // `model` is named in errors.
  std::string model;
  ModelFileFinder files;
  std::string chosen;
};

class TextModel {
 public:
  // InputError if there is no tokenizer, if it is malformed, or if it has ids that the embedding of
  // `config` has no row for.
  TextModel(const TokenizerSource& source, const ModelConfig& config);

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

// Adds to config.eos_token_ids what else ends a turn: eos_token_id of the model's
// generation_config.json, if it has one, and the end tokens that `text` (may be null) has by name.
// InputError for an eos_token_id that is neither an id nor a list of ids.
void add_end_tokens(const ModelFileFinder& files, const TextModel* text, ModelConfig& config);

}  // namespace kdtree
