// Text to token ids and back, with the vocabulary files that models are published with.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kdtree {

struct TokenizerParts;

// Byte-level byte pair encoding. All methods may be called from several threads at once.
class Tokenizer {
 public:
  // Made by the loaders below.
  explicit Tokenizer(std::unique_ptr<TokenizerParts> parts);
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;
  Tokenizer(Tokenizer&& other) noexcept;
  Tokenizer& operator=(Tokenizer&& other) noexcept;
  ~Tokenizer();

  // The ids of `text`; nothing is put before or behind them. With `parse_special` the added tokens
  // in it ("<|im_end|>") become their ids. Without, all of it is plain text, so that what a user
  // writes cannot end a turn. InputError if the text is not valid UTF-8 (naming the offset in
  // bytes), if it is 2 GiB or longer, or if a pattern of the tokenizer gives up on it.
  std::vector<std::int32_t> encode(std::string_view text, bool parse_special) const;

  // The bytes of all tokens, added ones included. Not valid UTF-8 if a character is incomplete;
  // StreamDecoder deals with that. InputError for an id outside of the vocabulary.
  std::string decode(std::span<const std::int32_t> ids) const;

  // The bytes of one token; they live as long as the tokenizer. InputError as decode().
  std::string_view token_bytes(std::int32_t id) const;

  // One more than the highest id. The model may have more rows, of which no token knows.
  std::int32_t vocab_size() const;

  // Whether the id is that of a control token, which is no part of an answer: an added token that
  // its file calls special. InputError as decode().
  bool is_special(std::int32_t id) const;

  // The id of the added token with this text, special or not; none if there is no such token.
  std::optional<std::int32_t> find_added(std::string_view text) const;

  // The ids of added tokens, such as those that end a turn. InputError, naming the file and the
  // text, if one is not there.
  std::vector<std::int32_t> added_ids(std::span<const std::string> texts) const;

  // The file it came from, as errors name it.
  const std::string& origin() const;

 private:
  std::unique_ptr<TokenizerParts> parts_;
};

// A file's content and how errors name it.
struct NamedText {
  std::string origin;
  std::string content;
};

// A tiktoken vocabulary (lines "token in base64, blank, rank") as Kimi K2 uses it: the split
// pattern is Kimi's; the 256 ids behind the ranks are added tokens, named by "added_tokens_decoder"
// in tokenizer_config.json or else "<|reserved_token_ID|>". InputError, naming file and line or
// key, if anything in it is not as expected.
Tokenizer parse_tiktoken(const NamedText& ranks, const NamedText& config);

// A tokenizer.json of Hugging Face's `tokenizers` with a byte-level BPE model. Ids equal those of
// its encode with add_special_tokens=False. InputError, naming file, key and value, for what is
// malformed or not supported.
Tokenizer parse_tokenizer_json(const NamedText& file);

// A model's file by its name ("tokenizer.json"); none if it has no such file. InputError if the
// file cannot be read.
using ModelFileFinder = std::function<std::optional<NamedText>(const std::string& name)>;

// From a model's files: tiktoken.model with tokenizer_config.json, else tokenizer.json. InputError
// names the file, or `origin`, which is what the user named, if there is none of them.
Tokenizer load_tokenizer(const ModelFileFinder& find, const std::string& origin);
// From a directory of such files, or from one of them (*.model has its tokenizer_config.json
// beside it).
Tokenizer load_tokenizer(const std::string& path);

// The text that begins every prompt: bos_token of tokenizer_config.json, if its add_bos_token is
// true; empty otherwise. InputError for a malformed file.
std::string load_bos_text(const ModelFileFinder& find);
// Of the directory `path`, or of the directory of the file `path`.
std::string load_bos_text(const std::string& path);

}  // namespace kdtree
