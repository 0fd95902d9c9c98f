// Results of two runs whose sums over ranks run in another order.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "config/model_config.h"
#include "engine/request.h"

namespace kdtree {

// Sums over ranks run in another order, so that tokens may first differ at a near-tie of either.
inline void expect_same_tokens(const Result& got, const Result& want) {
  if (got.output_ids == want.output_ids) {
    return;
  }
  const auto [a, b] = std::mismatch(got.output_ids.begin(), got.output_ids.end(),
                                    want.output_ids.begin(), want.output_ids.end());
  const std::int64_t first = a - got.output_ids.begin();
  const auto near_tie = [first](const Result& result) {
    return std::find(result.near_ties.begin(), result.near_ties.end(), first) !=
           result.near_ties.end();
  };
  EXPECT_TRUE(near_tie(got) || near_tie(want))
      << "token " << first << " of " << want.output_ids.size() << " differs and is no near-tie";
}

// Roundings to float32 that follow each other from a token's embedding to a logit: the additions of
// all sums on the way.
inline double roundings_to_a_logit(const ModelConfig& config, std::int64_t positions) {
  const std::int64_t attention = 2 * config.hidden_size + config.q_lora_rank + config.kv_lora_rank +
                                 config.qk_head_dim() + positions +
                                 config.num_attention_heads * config.v_head_dim;
  const std::int64_t experts =
      config.num_experts_per_tok +
      (1 + config.n_shared_experts) * (config.hidden_size + config.moe_intermediate_size);
  const std::int64_t dense = config.hidden_size + config.intermediate_size;
  return static_cast<double>(config.num_hidden_layers * (attention + std::max(experts, dense)) +
                             config.hidden_size);
}

// All logits behind the prompt, which two computations in float32 differ in by rounding alone. n
// roundings, each of at most u = 2^-24 of the value, change the residual stream by at most n u of
// its length. A logit is its product with a row of the head, which has nothing to do with the
// change's direction: of the deviation s of the logits over the vocabulary a logit changes by n u s
// times a normal value. Four standard deviations.
inline void expect_close_logits(const Result& got, const Result& want, const ModelConfig& config) {
  ASSERT_EQ(got.top_logits.size(), want.top_logits.size());
  double squares = 0;
  std::map<std::int32_t, double> of_token;
  for (const auto& [token, logit] : want.top_logits) {
    squares += static_cast<double>(logit) * logit;
    of_token[token] = logit;
  }
  const double deviation = std::sqrt(squares / static_cast<double>(want.top_logits.size()));
  const double roundings =
      roundings_to_a_logit(config, static_cast<std::int64_t>(want.prompt_ids.size()));
  const double bound = 4 * roundings * 0x1p-24 * deviation;
  for (const auto& [token, logit] : got.top_logits) {
    ASSERT_EQ(of_token.count(token), 1U) << "token " << token;
    EXPECT_LE(std::abs(of_token[token] - logit), bound) << "token " << token;
  }
}

}  // namespace kdtree
