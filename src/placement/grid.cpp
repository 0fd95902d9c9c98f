#include "placement/grid.h"

#include "core/check.h"

namespace kdtree {

namespace {

// One of the two sizes that multiply to the ranks; 0: not given.
struct GridSize {
  const char* flag;
  std::int64_t value = 0;
};

// The second size. Without either it is 1.
int second_of_pair(const GridSize& first, const GridSize& second, int world_size) {
  for (const GridSize& size : {first, second}) {
    require_input(size.value == 0 || world_size % size.value == 0,
                  "{} {}: expected a number that divides the {} rank{} of this run", size.flag,
                  size.value, world_size, world_size == 1 ? "" : "s");
  }
  if (first.value > 0 && second.value > 0) {
    require_input(first.value * second.value == world_size,
                  "{} {} and {} {}: they multiply to {}, expected {}, the number of ranks",
                  first.flag, first.value, second.flag, second.value, first.value * second.value,
                  world_size);
  }
  if (second.value > 0) {
    return static_cast<int>(second.value);
  }
  return first.value > 0 ? world_size / static_cast<int>(first.value) : 1;
}

}  // namespace

ParallelGrid make_grid(const GridOptions& options, int world_size) {
  return {.moe_tp = second_of_pair({"--moe-ep", options.moe_ep}, {"--moe-tp", options.moe_tp},
                                   world_size),
          .attention_dp = second_of_pair({"--attention-tp", options.attention_tp},
                                         {"--attention-dp", options.attention_dp}, world_size)};
}

}  // namespace kdtree
