// Checkpoints without files: a config whose tensors are drawn when they are loaded. For studies of
// models whose weights are not at hand: sizes, formats and speed are those of the real one, the
// text is noise. A tensor's values depend on the seed and its name alone: not on backend, ranks or
// grid.
#pragma once

#include <cstdint>
#include <string>

#include "weights/checkpoint.h"

namespace kdtree {

// `path`: a config.json, or a directory that holds one. Matrices are bf16 and uniform with the
// variance 1 / columns (embeddings 1), routed experts of a quantised config packed INT4 with bf16
// scales, norms 1, the router's correction bias within 0.01 of 0. InputError as open_target.
TargetCheckpoint random_target(const std::string& path, std::uint64_t seed);
TargetCheckpoint random_target(const ModelConfig& config, std::uint64_t seed);
DrafterCheckpoint random_drafter(const std::string& path, std::uint64_t seed);

// For plans alone, nothing can be loaded from it: the tensors that a checkpoint of this config
// stores. As random_target, but for the fp8 blocks of configs that state them.
TargetCheckpoint planned_target(const std::string& path);

}  // namespace kdtree
