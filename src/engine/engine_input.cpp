// What goes into an engine: checked, and brought from rank 0 to all.
#include <algorithm>

#include "engine/engine.h"

namespace kdtree {

void check_requests(const std::vector<Request>& requests, const ModelConfig& config,
                    const EngineOptions& options) {
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Request& request = requests[i];
    const auto length = static_cast<std::int64_t>(request.prompt_ids.size());
    require_input(length > 0, "prompt {} is empty: it needs at least one token", i);
    for (const std::int32_t token : request.prompt_ids) {
      require_input(token >= 0 && token < config.vocab_size,
                    "prompt {}: token id {} is outside the vocabulary, expected 0 to {}", i, token,
                    config.vocab_size - 1);
    }
    require_input(length < options.max_context,
                  "prompt {} has {} tokens, but the context holds {} with at least one new token: "
                  "shorten it or raise "
                  "--max-context",
                  i, length, options.max_context);
    require_input(length <= options.max_prompt,
                  "prompt {} has {} tokens, the engine was made for {}", i, length,
                  options.max_prompt);
    require_input(request.max_new_tokens > 0,
                  "prompt {}: max_new_tokens is {}, expected at least 1", i,
                  request.max_new_tokens);
  }
}

void check_windows(const std::vector<ScoreWindow>& windows, const ModelConfig& config,
                   const EngineOptions& options) {
  for (std::size_t i = 0; i < windows.size(); ++i) {
    const ScoreWindow& window = windows[i];
    const auto length = std::ssize(window.token_ids);
    require_input(length >= 2, "window {} has {} tokens, expected at least 2", i, length);
    require_input(window.first_scored >= 1 && window.first_scored < length,
                  "window {}: first_scored is {}, expected 1 to {}", i, window.first_scored,
                  length - 1);
    for (const std::int32_t token : window.token_ids) {
      require_input(token >= 0 && token < config.vocab_size,
                    "window {}: token id {} is outside the vocabulary, expected 0 to {}", i, token,
                    config.vocab_size - 1);
    }
    // The last token is scored, not processed.
    const std::int64_t most = 1 + std::min(options.max_prompt, options.max_context);
    require_input(length <= most, "window {} has {} tokens, the engine was made for {}", i, length,
                  most);
  }
}

std::vector<std::int64_t> Engine::share_words(std::vector<std::int64_t> words) {
  auto size = static_cast<std::int64_t>(words.size());
  group_.broadcast(&size, sizeof size, 0);
  words.resize(static_cast<std::size_t>(size));
  group_.broadcast(words.data(), size * static_cast<std::int64_t>(sizeof(std::int64_t)), 0);
  return words;
}

// Only rank 0 may have read the prompts (its file, its flags): all decode what it has.
std::vector<Request> Engine::share_requests(const std::vector<Request>& requests) {
  std::vector<std::int64_t> words;
  if (group_.rank() == 0) {
    for (const Request& request : requests) {
      words.insert(words.end(), {request.max_new_tokens, request.ignore_eos ? 1 : 0,
                                 static_cast<std::int64_t>(request.prompt_ids.size())});
      words.insert(words.end(), request.prompt_ids.begin(), request.prompt_ids.end());
    }
  }
  words = share_words(std::move(words));
  std::vector<Request> shared;
  for (std::size_t at = 0; at < words.size();) {
    Request request{
        .prompt_ids = {}, .max_new_tokens = words[at], .ignore_eos = words[at + 1] != 0};
    const auto length = static_cast<std::size_t>(words[at + 2]);
    at += 3;
    for (std::size_t i = 0; i < length; ++i) {
      request.prompt_ids.push_back(static_cast<std::int32_t>(words[at + i]));
    }
    at += length;
    shared.push_back(std::move(request));
  }
  return shared;
}

std::vector<ScoreWindow> Engine::share_windows(const std::vector<ScoreWindow>& windows) {
  std::vector<std::int64_t> words;
  if (group_.rank() == 0) {
    for (const ScoreWindow& window : windows) {
      words.insert(words.end(), {window.first_scored, std::ssize(window.token_ids)});
      words.insert(words.end(), window.token_ids.begin(), window.token_ids.end());
    }
  }
  words = share_words(std::move(words));
  std::vector<ScoreWindow> shared;
  for (std::size_t at = 0; at < words.size();) {
    ScoreWindow window{.token_ids = {}, .first_scored = words[at]};
    const auto end = at + 2 + static_cast<std::size_t>(words[at + 1]);
    for (at += 2; at < end; ++at) {
      window.token_ids.push_back(static_cast<std::int32_t>(words[at]));
    }
    shared.push_back(std::move(window));
  }
  return shared;
}

}  // namespace kdtree
