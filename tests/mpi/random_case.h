// Random models with prompts and engine options: odd sizes, all formats, every kind of layer.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "tests/unit/checkpoint_builder.h"

namespace kdtree {

struct RandomCase {
  CheckpointRecipe recipe;
  EngineOptions engine;  // mode and tree_budget are for the drafting run
  bool round_to_bfloat16 = false;
  std::vector<Request> requests;
};

// Equal on every rank for equal arguments.
RandomCase random_case(std::uint64_t seed, int num_ranks);

// What the numbers of a case are, for failures.
std::string describe(const RandomCase& random);

// Integers that are the same with every standard library.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool one_in(std::int64_t count) { return between(1, count) == 1; }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return *(choices.begin() + between(0, static_cast<std::int64_t>(choices.size()) - 1));
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace kdtree
