// Rotary position embeddings: frequencies, YaRN, the table that the rope op reads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/model_config.h"

namespace kdtree {

// Inverse frequency of each rotated pair, [rope_dim / 2]: theta^(-2i / rope_dim), blended by YaRN
// (Peng et al. 2023, as DeepSeek's reference computes it) where the config asks for it.
std::vector<double> rope_inverse_frequencies(const RopeConfig& rope, std::int64_t rope_dim);

// What YaRN multiplies cosine and sine by: mscale(factor, mscale) / mscale(factor, mscale_all_dim),
// or the config's attention_factor. 1 without YaRN.
double rope_amplitude(const RopeConfig& rope);

// Sets that amplitude (attention_factor) in place of what the config gives. InputError, beginning
// with `origin`, without YaRN.
void override_rope_amplitude(RopeConfig& rope, double amplitude, const std::string& origin);

// The scale of attention scores: head_dim^-1/2, times mscale(factor, mscale_all_dim)^2 under YaRN.
double softmax_scale(const RopeConfig& rope, std::int64_t head_dim);

// [num_positions, rope_dim]: rope_dim / 2 cosines, then as many sines, of position * inverse
// frequency.
std::vector<float> rope_table(const RopeConfig& rope, std::int64_t rope_dim,
                              std::int64_t num_positions);

}  // namespace kdtree
