#include "tests/mpi/random_case.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/mpi/test_model.h"

namespace kdtree {

namespace {

void choose_router(Dice& dice, ModelConfig& config) {
  if (dice.one_in(3)) {
    config.architecture = "DeepseekV2ForCausalLM";
    config.routed_scaling_always = false;
    config.scoring_func = "softmax";
    config.topk_method = dice.pick({"greedy", "group_limited_greedy"});
    config.norm_topk_prob = dice.one_in(2);
  } else {
    config.norm_topk_prob = !dice.one_in(4);
  }
  config.routed_scaling_factor = dice.pick({1.0, 2.5, 0.75});
  // Experts in groups of two at least, or any number without groups.
  config.n_group = dice.one_in(2) ? dice.between(2, 3) : 1;
  config.n_routed_experts =
      config.n_group > 1 ? config.n_group * dice.between(2, 4) : dice.between(1, 9);
  config.topk_group = dice.between(1, config.n_group);
  const std::int64_t open = config.topk_group * (config.n_routed_experts / config.n_group);
  config.num_experts_per_tok = dice.between(1, std::min<std::int64_t>(open, 4));
  config.n_shared_experts = dice.between(0, 2);
  config.moe_intermediate_size = dice.pick<std::int64_t>({5, 7, 8, 11, 16, 24, 32});
}

void choose_layers(Dice& dice, ModelConfig& config) {
  config.num_hidden_layers = dice.between(1, 4);
  config.intermediate_size = dice.pick<std::int64_t>({7, 9, 13, 16, 24, 32, 40});
  config.first_k_dense_replace = dice.between(0, config.num_hidden_layers);
  config.moe_layer_freq = dice.one_in(4) ? 2 : 1;
  if (config.first_k_dense_replace < config.num_hidden_layers || dice.one_in(2)) {
    choose_router(dice, config);
  }
}

void choose_attention(Dice& dice, ModelConfig& config, int num_ranks) {
  config.num_attention_heads = dice.between(num_ranks, num_ranks + 3);
  config.q_lora_rank = dice.one_in(2) ? 0 : dice.between(3, 16);
  config.kv_lora_rank = dice.between(3, 20);
  config.qk_nope_head_dim = dice.between(3, 9);
  config.qk_rope_head_dim = 2 * dice.between(1, 4);
  config.v_head_dim = dice.between(3, 9);
  config.rope.rope_theta = dice.pick({10000.0, 50000.0});
  if (dice.one_in(2)) {
    config.rope.yarn = true;
    config.rope.factor = dice.pick({4.0, 40.0});
    config.rope.mscale_all_dim = dice.pick({0.0, 1.0});
    config.rope.original_max_position_embeddings = 32;
  }
}

ModelConfig random_target(Dice& dice, int num_ranks, std::int64_t group_size) {
  ModelConfig config;
  config.architecture = "DeepseekV3ForCausalLM";
  config.vocab_size = dice.between(5, 40);
  config.hidden_size =
      group_size > 0 && !dice.one_in(4) ? group_size * dice.between(1, 2) : dice.between(9, 33);
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = dice.pick({1e-6, 1e-5});
  config.tie_word_embeddings = dice.one_in(6);
  choose_attention(dice, config, num_ranks);
  choose_layers(dice, config);
  for (std::int64_t count = dice.between(0, 3); count > 0; --count) {
    const std::int64_t id = dice.between(0, config.vocab_size - 1);
    if (std::count(config.eos_token_ids.begin(), config.eos_token_ids.end(), id) == 0) {
      config.eos_token_ids.push_back(id);
    }
  }
  return config;
}

DrafterConfig random_drafter(Dice& dice, const ModelConfig& target) {
  DrafterConfig config;
  config.vocab_size = target.vocab_size;
  config.hidden_size = target.hidden_size;
  config.intermediate_size = dice.pick<std::int64_t>({5, 9, 16, 24});
  config.num_hidden_layers = dice.between(1, 2);
  config.num_key_value_heads = dice.between(1, 4);
  config.num_attention_heads = config.num_key_value_heads * dice.between(1, 3);
  config.head_dim = 2 * dice.between(1, 5);
  config.block_size = dice.between(2, 9);
  config.mask_token_id = dice.between(0, target.vocab_size - 1);
  for (std::int64_t layer = 0; layer < target.num_hidden_layers; ++layer) {
    if (dice.one_in(2)) {
      config.target_layer_ids.push_back(layer);
    }
  }
  if (config.target_layer_ids.empty() || dice.one_in(2)) {
    const std::int64_t last = target.num_hidden_layers - 1;
    if (config.target_layer_ids.empty() || config.target_layer_ids.back() != last) {
      config.target_layer_ids.push_back(last);
    }
  }
  return config;
}

// A packed o_proj is divided between heads, so its groups must not span them: such checkpoints are
// refused for several ranks.
void align_heads(CheckpointRecipe& recipe) {
  const std::int64_t group = recipe.group_size;
  ModelConfig& target = recipe.target;
  if (target.num_attention_heads * target.v_head_dim % group == 0) {
    target.v_head_dim = group;
  }
  DrafterConfig& drafter = *recipe.drafter;
  if (drafter.num_attention_heads * drafter.head_dim % group == 0) {
    drafter.head_dim = group;
  }
}

std::vector<Request> random_requests(Dice& dice, std::int64_t vocab_size) {
  std::vector<Request> requests(static_cast<std::size_t>(dice.between(1, 5)));
  for (Request& request : requests) {
    const std::int64_t length = dice.one_in(3) ? dice.between(1, 2) : dice.between(3, 14);
    for (std::int64_t i = 0; i < length; ++i) {
      request.prompt_ids.push_back(static_cast<std::int32_t>(dice.between(0, vocab_size - 1)));
    }
    request.max_new_tokens = dice.between(1, 18);
    request.ignore_eos = dice.one_in(3);
  }
  return requests;
}

std::int64_t longest_prompt(const std::vector<Request>& requests) {
  std::size_t longest = 0;
  for (const Request& request : requests) {
    longest = std::max(longest, request.prompt_ids.size());
  }
  return static_cast<std::int64_t>(longest);
}

}  // namespace

RandomCase random_case(std::uint64_t seed, int num_ranks) {
  Dice dice(seed * 1000 + static_cast<std::uint64_t>(num_ranks));
  RandomCase random;
  CheckpointRecipe& recipe = random.recipe;
  recipe.seed = seed;
  recipe.group_size = dice.one_in(2) ? dice.pick<std::int64_t>({8, 16, 32}) : 0;
  recipe.quantize_all = dice.one_in(2);
  recipe.scale_dtype = dice.pick({DType::kFloat32, DType::kBFloat16});
  recipe.weight_dtype = dice.pick({DType::kFloat32, DType::kBFloat16});
  recipe.target = random_target(dice, num_ranks, recipe.group_size);
  recipe.drafter = random_drafter(dice, recipe.target);
  if (recipe.group_size > 0 && recipe.quantize_all && num_ranks > 1) {
    align_heads(recipe);
  }
  random.round_to_bfloat16 = dice.one_in(5);
  random.requests = random_requests(dice, recipe.target.vocab_size);
  random.engine.mode = Mode::kTree;
  random.engine.tree_budget = dice.one_in(3) ? dice.between(1, 8) : dice.between(9, 64);
  random.engine.batch_size = dice.between(1, 4);
  random.engine.exchange =
      dice.pick({ExchangeKind::kAllReduce, ExchangeKind::kAllToAll, ExchangeKind::kAllGather});
  // How the step runs must change nothing; by the seed, so that the other choices stay as they are.
  random.engine.fixed_counts = seed % 2 == 1;
  random.engine.steps_ahead = static_cast<std::int64_t>(seed / 2 % 2);
  if (dice.one_in(3)) {
    random.engine.max_context = longest_prompt(random.requests) + dice.between(1, 8);
  }
  return random;
}

std::string describe(const RandomCase& random) {
  std::string text = to_json(random.recipe.target).dump() + to_json(*random.recipe.drafter).dump();
  text += fmt::format(
      " group {} all {} scales {} weights {} round {} budget {} batch {} context {} {} fixed {} "
      "ahead "
      "{}",
      random.recipe.group_size, random.recipe.quantize_all, dtype_name(random.recipe.scale_dtype),
      dtype_name(random.recipe.weight_dtype), random.round_to_bfloat16, random.engine.tree_budget,
      random.engine.batch_size, random.engine.max_context, exchange_name(random.engine.exchange),
      random.engine.fixed_counts, random.engine.steps_ahead);
  return text;
}

}  // namespace kdtree
