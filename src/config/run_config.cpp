#include "config/run_config.h"

#include <charconv>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "core/json_text.h"

namespace kdtree {

namespace {

using TokenIds = std::vector<std::int32_t>;

TokenIds parse_id_list(std::string_view text) {
  TokenIds ids;
  if (text.find_first_not_of(" \t") == std::string_view::npos) {
    return ids;  // an empty prompt: refused where prompts are checked, in the same words for all
                 // sources
  }
  while (true) {
    const std::size_t comma = text.find(',');
    std::string_view word = text.substr(0, comma);
    while (!word.empty() && (word.front() == ' ' || word.front() == '\t')) {
      word.remove_prefix(1);
    }
    while (!word.empty() && (word.back() == ' ' || word.back() == '\t')) {
      word.remove_suffix(1);
    }
    std::int32_t id = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    require_input(error == std::errc() && end == word.data() + word.size(),
                  "--prompt-ids: '{}' is no token id, expected whole numbers with commas between "
                  "them, as 1,2,3",
                  word);
    ids.push_back(id);
    if (comma == std::string_view::npos) {
      return ids;
    }
    text.remove_prefix(comma + 1);
  }
}

bool fits_int32(const nlohmann::ordered_json& value) {
  using Limits = std::numeric_limits<std::int32_t>;
  // By hand: json compares an unsigned number with an int as signed ones, 2^64 - 1 as -1.
  if (value.is_number_unsigned()) {
    return value.get<std::uint64_t>() <= static_cast<std::uint64_t>(Limits::max());
  }
  return value.is_number_integer() && value.get<std::int64_t>() >= Limits::min();
}

TokenIds parse_json_ids(const nlohmann::ordered_json& list, const std::string& origin) {
  require_input(list.is_array(), "{}: prompt_ids must be a list of token ids", origin);
  TokenIds ids;
  for (const nlohmann::ordered_json& value : list) {
    require_input(fits_int32(value), "{}: prompt_ids holds {}, expected whole numbers", origin,
                  describe_json(value));
    ids.push_back(value.get<std::int32_t>());
  }
  return ids;
}

PromptInput parse_prompt_line(const std::string& line, const std::string& origin) {
  nlohmann::ordered_json json = parse_ordered_json(line, origin);
  require_input(json.is_object(),
                "{}: expected a JSON object with prompt_ids, prompt or messages, got '{}'", origin,
                line.substr(0, 80));
  const bool has_ids = json.contains("prompt_ids");
  const bool has_text = json.contains("prompt");
  const bool has_chat = json.contains("messages");
  require_input(
      static_cast<int>(has_ids) + static_cast<int>(has_text) + static_cast<int>(has_chat) == 1,
      "{}: expected one of the keys prompt_ids, prompt and messages, got '{}'", origin,
      line.substr(0, 80));
  PromptInput prompt{
      .kind = PromptInput::Kind::kIds, .ids = {}, .text = "", .chat = {}, .origin = origin};
  if (has_ids) {
    prompt.ids = parse_json_ids(json["prompt_ids"], origin);
  } else if (has_text) {
    prompt.kind = PromptInput::Kind::kText;
    const nlohmann::ordered_json& text = json["prompt"];
    require_input(text.is_string(), "{}: prompt is {}, expected a string", origin,
                  describe_json(text));
    prompt.text = text.get<std::string>();
  } else {
    prompt.kind = PromptInput::Kind::kChat;
    prompt.chat = std::move(json);
  }
  return prompt;
}

}  // namespace

std::string options_text(const RunConfig& config) {
  return fmt::format(
      "batch-size {} max-new-tokens {} max-context {} memory-fraction {} mode {} tree-budget {} "
      "draft-length {} "
      "weights {} weights-seed {} backend {} communicator {} exchange {} dtype {} ignore-eos {} "
      "top-logits {} "
      "dump-steps {} output-format {} verify-golden {} draft-rope-amplitude {} rebalance-every {} "
      "record-expert-load {} record-exchange {} moe-ep {} moe-tp {} attention-tp {} attention-dp "
      "{}",
      config.batch_size, config.max_new_tokens, config.max_context, config.memory_fraction,
      config.mode, config.tree_budget, config.draft_length, config.weights, config.weights_seed,
      config.backend, config.communicator, config.exchange, config.dtype, config.ignore_eos,
      config.top_logits, config.dump_steps, config.output_format, config.verify_golden,
      config.draft_rope_amplitude, config.rebalance_every,
      config.record_expert_load.empty() ? "no" : "yes",
      config.record_exchange.empty() ? "no" : "yes", config.grid.moe_ep, config.grid.moe_tp,
      config.grid.attention_tp, config.grid.attention_dp);
}

std::vector<PromptInput> read_prompt_file(const std::string& flag, const std::string& file) {
  std::ifstream stream(file);
  require_input(stream.good(), "{}: cannot open {}", flag, file);
  std::vector<PromptInput> prompts;
  std::string line;
  for (std::int64_t number = 1; std::getline(stream, line); ++number) {
    if (line.find_first_not_of(" \t\r") != std::string::npos) {
      prompts.push_back(parse_prompt_line(line, fmt::format("{}: line {}", file, number)));
    }
  }
  require_input(!stream.bad(), "{}: cannot read {}", flag, file);
  require_input(!prompts.empty(), "{}: {} holds no prompt", flag, file);
  return prompts;
}

std::vector<PromptInput> read_prompts(const RunConfig& config) {
  using Kind = PromptInput::Kind;
  require_input(config.prompt_ids.empty() || config.prompts.empty(),
                "give --prompt-ids or --prompts, not both");
  std::vector<PromptInput> prompts;
  if (!config.prompts.empty()) {
    prompts = read_prompt_file("--prompts", config.prompts);
  }
  for (const std::string& text : config.prompt_ids) {
    prompts.push_back({.kind = Kind::kIds,
                       .ids = parse_id_list(text),
                       .text = "",
                       .chat = {},
                       .origin = "--prompt-ids"});
  }
  for (std::size_t i = 0; i < config.prompt.size(); ++i) {
    prompts.push_back({.kind = Kind::kText,
                       .ids = {},
                       .text = config.prompt[i],
                       .chat = {},
                       .origin = fmt::format("--prompt (number {})", i)});
  }
  if (!config.chat.empty()) {
    prompts.push_back({.kind = Kind::kChat,
                       .ids = {},
                       .text = "",
                       .chat = read_ordered_json_file(config.chat),
                       .origin = config.chat});
  }
  return prompts;
}

}  // namespace kdtree
