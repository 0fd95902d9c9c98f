#include "text_output.h"

#include <algorithm>

#include "core/check.h"
#include "core/json_text.h"

namespace kdtree {

namespace {

constexpr const char* kReplacement = "\xef\xbf\xbd";  // U+FFFD

// Kimi ends turns with the second, DeepSeek with the last.
constexpr const char* kEndTokens[] = {"[EOS]", "<|im_end|>", "<｜end▁of▁sentence｜>"};

bool is_end(std::int32_t id, const std::vector<std::int64_t>& end_ids) {
  return std::find(end_ids.begin(), end_ids.end(), id) != end_ids.end();
}

void add_end(std::int64_t id, ModelConfig& config) {
  if (std::find(config.eos_token_ids.begin(), config.eos_token_ids.end(), id) ==
      config.eos_token_ids.end()) {
    config.eos_token_ids.push_back(id);
  }
}

void add_from_generation_config(const NamedText& text, ModelConfig& config) {
  const std::string& file = text.origin;
  const nlohmann::json json = parse_json(text.content, file);
  require_input(json.is_object(), "{}: is {}, expected an object", file, describe_json(json));
  const auto entry = json.find("eos_token_id");
  if (entry == json.end() || entry->is_null()) {
    return;
  }
  const nlohmann::json list = entry->is_array() ? *entry : nlohmann::json::array({*entry});
  for (const nlohmann::json& id : list) {
    // By hand: json compares an unsigned number with an int as signed ones.
    const bool good = id.is_number_unsigned() &&
                      id.get<std::uint64_t>() < static_cast<std::uint64_t>(config.vocab_size);
    require_input(good, "{}: key 'eos_token_id' is {}, expected token ids from 0 to {}", file,
                  describe_json(*entry), config.vocab_size - 1);
    add_end(id.get<std::int64_t>(), config);
  }
}

Tokenizer load_own(const TokenizerSource& source) {
  require_input(source.files("tiktoken.model") || source.files("tokenizer.json"),
                "{}: holds no tokenizer: give --tokenizer, a directory or a file", source.model);
  return load_tokenizer(source.files, source.model);
}

}  // namespace

TextModel::TextModel(const TokenizerSource& source, const ModelConfig& config)
    : tokenizer_(source.chosen.empty() ? load_own(source) : load_tokenizer(source.chosen)) {
  require_input(tokenizer_.vocab_size() <= config.vocab_size,
                "{}: its ids go up to {}, but {} has vocab_size {}: expected a tokenizer of this "
                "model",
                tokenizer_.origin(), tokenizer_.vocab_size() - 1, source.model, config.vocab_size);
  const std::string begin =
      source.chosen.empty() ? load_bos_text(source.files) : load_bos_text(source.chosen);
  if (!begin.empty()) {
    const std::vector<std::string> texts = {begin};
    begin_ids_ = tokenizer_.added_ids(texts);
  }
}

std::vector<std::int32_t> TextModel::encode_prompt(const std::string& text,
                                                   const std::string& origin,
                                                   bool parse_special) const {
  std::vector<std::int32_t> ids = begin_ids_;
  try {
    const std::vector<std::int32_t> encoded = tokenizer_.encode(text, parse_special);
    require_input(!encoded.empty(), "the text has no tokens, expected at least one");
    ids.insert(ids.end(), encoded.begin(), encoded.end());
  } catch (const InputError& error) {
    fail_input("{}: {}", origin, error.what());
  }
  return ids;
}

std::vector<std::int32_t> TextModel::encode_conversation(const Chat& chat,
                                                         ChatTemplate chat_template,
                                                         bool thinking) const {
  return encode_chat(tokenizer_, render_chat(chat_template, chat, thinking));
}

ChatTemplate choose_chat_template(const std::string& name, const TargetCheckpoint& target) {
  if (const auto named = find_chat_template(name)) {
    return *named;
  }
  const nlohmann::json& config = target.config_json;
  const auto type = config.is_object() ? config.find("model_type") : config.end();
  require_input(type != config.end() && *type == "kimi_k25",
                "{}: its model_type does not tell the chat template, give --chat-template "
                "kimi-k2.6, kimi-k2, deepseek-v3 or deepseek-r1",
                target.origin);
  return ChatTemplate::kKimiK26;
}

std::string TextModel::decode(std::span<const std::int32_t> ids,
                              const std::vector<std::int64_t>& end_ids) const {
  TextStream stream(*this, end_ids);
  return stream.push({.index = 0, .tokens = ids, .finished = true});
}

std::string TextStream::push(const TokenUpdate& update) {
  std::string text;
  const std::size_t count = update.tokens.size();
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t id = update.tokens[i];
    if (update.finished && i + 1 == count && is_end(id, end_ids_)) {
      break;
    }
    try {
      text += decoder_.push(id);
    } catch (const InputError&) {
      // A row of the embedding that no token has; the model may choose it all the same.
      text += decoder_.finish() + kReplacement;
    }
  }
  return update.finished ? text + decoder_.finish() : text;
}

void add_end_tokens(const ModelFileFinder& files, const TextModel* text, ModelConfig& config) {
  if (const auto file = files("generation_config.json")) {
    add_from_generation_config(*file, config);
  }
  if (text == nullptr) {
    return;
  }
  for (const char* name : kEndTokens) {
    if (const auto id = text->tokenizer().find_added(name)) {
      add_end(*id, config);
    }
  }
}

}  // namespace kdtree
