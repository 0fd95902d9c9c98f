// What one run of `kdtree generate` is asked to do; the flags of the program and the keys of its
// TOML files.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kdtree {

// Which rank holds which routed expert.
struct PlacementOptions {
  std::string policy = "linear";  // linear, round-robin, balanced, replicated, or a file
  std::int64_t expert_slots = 0;  // of a layer, on all ranks together; replicated only
  std::string expert_load;        // file of loads; balanced and replicated only
};

// How ranks share experts and attention; 0: not given.
struct GridOptions {
  std::int64_t moe_ep = 0;        // groups of ranks, each with experts of its own
  std::int64_t moe_tp = 0;        // ranks of such a group, each with a slice of every expert
  std::int64_t attention_tp = 0;  // ranks of a group that shares heads
  std::int64_t attention_dp = 0;  // such groups, each with sequences of its own
};

struct RunConfig {
  std::string model;
  std::string draft;  // empty: the bundle's own drafter
  // "auto" or a number: what the drafter's rotary cosines and sines are multiplied by; auto: what
  // its config gives
  std::string draft_rope_amplitude = "auto";
  std::int64_t draft_length = 0;        // tokens that the drafter proposes a step; 0: its block's
  std::vector<std::string> prompt_ids;  // each "1,2,3"
  std::vector<std::string> prompt;      // texts
  std::string prompts;                  // JSON lines with prompt_ids, prompt or messages
  std::string chat;                     // file of a conversation
  std::string chat_template = "auto";   // of kimi-k2.6 for model_type kimi_k25, else to be named
  std::string thinking = "on";          // or "off"
  std::string tokenizer;                // directory or file; empty: in the model's directory
  bool parse_special = false;           // control tokens in texts count as such
  std::int64_t batch_size = 1;
  std::int64_t max_new_tokens = 128;
  std::int64_t max_context = 0;  // 0: the longest prompt and its output
  double memory_fraction = 0;    // of the free memory, for max_context; 0: max_context counts
  std::string mode = "auto";     // auto: tree where there is a drafter, else plain
  std::int64_t tree_budget = 16;
  std::string weights = "auto";
  std::int64_t weights_seed = 1;  // of weights "random"
  std::string backend = "auto";
  std::string communicator = "auto";
  std::string exchange = "auto";
  GridOptions grid;
  PlacementOptions placement;
  std::int64_t rebalance_every = 0;  // admitted prompts; 0: never
  std::string record_expert_load;    // file that gets the experts' loads; empty: none
  std::string record_exchange;       // file that gets the exchanges' counters; empty: none
  std::string write_placement;       // file that gets the placement; empty: none
  std::string dtype = "auto";
  bool ignore_eos = false;
  std::int64_t top_logits = 0;
  bool dump_steps = false;
  std::string output_format = "text";
  bool verify_golden = false;
  std::int64_t threads = 0;  // 0: OMP_NUM_THREADS, else the host's cores shared among its ranks
  std::string log_level = "info";
};

inline constexpr std::int64_t kMaxTreeBudget = 512;

// The options that all ranks must share as one text, for comparing what they were started with: all
// but prompts (rank 0's count), paths (which may differ from host to host), threads and log level.
std::string options_text(const RunConfig& config);

// A prompt as the user gave it: token ids, a text, or a conversation.
struct PromptInput {
  enum class Kind : std::uint8_t { kIds, kText, kChat };
  Kind kind = Kind::kIds;
  std::vector<std::int32_t> ids;  // kIds; may be empty
  std::string text;               // kText
  nlohmann::ordered_json chat;    // kChat: what parse_chat() reads, valid or not
  std::string origin;             // for errors: flag, or file and line
};

// The lines of a file of prompts, which `flag` names. InputError as read_prompts.
std::vector<PromptInput> read_prompt_file(const std::string& flag, const std::string& file);

// The prompts of a run: each of --prompt-ids or each line of the prompts file, each --prompt, then
// the conversation in the file of --chat, whose `origin` is the path. InputError names flag or
// file, line and value, and says what was expected.
std::vector<PromptInput> read_prompts(const RunConfig& config);

}  // namespace kdtree
