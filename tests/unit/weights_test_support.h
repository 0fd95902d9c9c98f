// What the tests of configs and weights share.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "config/model_config.h"
#include "core/check.h"

namespace kdtree {

// A checkpoint of tests/data/goldens.
inline std::string goldens_path(const std::string& name) {
  if (const char* folder = std::getenv("KDTREE_GOLDENS")) {
    return std::string(folder) + "/" + name;
  }
  const char* source = std::getenv("KDTREE_SOURCE");
  return (source == nullptr ? "" : std::string(source) + "/") + "tests/data/goldens/" + name;
}

// configs/models/NAME.json.
inline std::string models_path(const std::string& name) {
  const char* source = std::getenv("KDTREE_SOURCE");
  return (source == nullptr ? "" : std::string(source) + "/") + "configs/models/" + name + ".json";
}

// A folder that goes away with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kdtree-XXXXXX").string();
    check(::mkdtemp(pattern.data()) != nullptr, "no temporary folder {}", pattern);
    path_ = pattern;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_file(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

// Expects an InputError whose text holds each of `parts`.
template <class Action>
void expect_input_error(Action action, std::initializer_list<std::string> parts) {
  try {
    action();
    ADD_FAILURE() << "no error; expected one with '" << *parts.begin() << "'";
  } catch (const InputError& error) {
    const std::string text = error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
    }
  }
}

// A target with everything that matters in small: a dense layer, shared and routed experts in
// groups, low-rank queries, sizes that ranks do not divide.
inline ModelConfig tiny_target() {
  ModelConfig config;
  config.architecture = "DeepseekV3ForCausalLM";
  config.vocab_size = 83;
  config.hidden_size = 32;
  config.intermediate_size = 80;
  config.moe_intermediate_size = 16;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 5;
  config.n_shared_experts = 2;
  config.n_routed_experts = 6;
  config.num_experts_per_tok = 2;
  config.n_group = 2;
  config.topk_group = 1;
  config.first_k_dense_replace = 1;
  config.q_lora_rank = 24;
  config.kv_lora_rank = 16;
  config.qk_nope_head_dim = 8;
  config.qk_rope_head_dim = 4;
  config.v_head_dim = 8;
  config.max_position_embeddings = 128;
  config.eos_token_ids = {1};
  return config;
}

inline DrafterConfig tiny_drafter() {
  DrafterConfig config;
  config.vocab_size = 83;
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 6;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  config.block_size = 4;
  config.mask_token_id = 82;
  config.target_layer_ids = {0, 1};
  return config;
}

}  // namespace kdtree
