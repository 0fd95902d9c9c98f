// The routed experts with any number of rows, spread over the experts in every way.
#include <array>

#include "tests/unit/op_experts.h"

namespace kdtree::ops_test {
namespace {

constexpr std::int64_t kSlotsHere = 9;
constexpr std::int64_t kExperts = 12;  // three of them on other ranks
constexpr std::int64_t kChosen = 8;

struct Case {
  WeightKind kind;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;

  std::string name() const {
    return kind.name() + ", hidden " + std::to_string(hidden) + ", intermediate " +
           std::to_string(intermediate);
  }
};

// Plain formats, and INT4 in shapes that a backend may keep in an order of its own.
std::vector<Case> cases(const Backend& backend) {
  constexpr WeightKind kPacked = {WeightFormat::kInt4Group, 32, DType::kBFloat16};
  std::vector<Case> all = {{{WeightFormat::kFloat32}, 37, 21},
                           {{WeightFormat::kBFloat16}, 64, 40},
                           {{WeightFormat::kInt4Group, 16, DType::kFloat32}, 48, 32},
                           {kPacked, 128, 64},
                           {kPacked, 256, 128},
                           {kPacked, 512, 128}};
  if (backend.name() != "cpu") {  // which would take minutes
    all.push_back({kPacked, 2048, 256});
    all.push_back({kPacked, 7168, 128});
  }
  return all;
}

class ExpertRowsTest : public ExpertsOpTest {
 protected:
  // No experts yet: ids of -1, random weights, and expert e in slot kSlotsHere - 1 - e.
  Routed empty_routing(Random& random, std::int64_t hidden) const {
    Routed routed = {.k = kChosen,
                     .x = activations(random, kMostRows * hidden),
                     .ids = std::vector<std::int32_t>(kMostRows * kChosen, -1),
                     .weights = random.floats(kMostRows * kChosen, 0, 1),
                     .slot_of = {}};
    for (std::int32_t expert = 0; expert < kExperts; ++expert) {
      routed.slot_of.push_back(
          expert < kSlotsHere ? static_cast<std::int32_t>(kSlotsHere) - 1 - expert : -1);
    }
    return routed;
  }

  // The same bits in calls of any number of rows, and right ones. `fill` chooses the experts.
  void expect_rows(std::uint64_t seed, const std::function<void(Random&, Routed&)>& fill) {
    Random random(seed);
    for (const Case& shape : cases(backend())) {
      const Experts experts(backend(), shape.kind, {kSlotsHere, shape.hidden, shape.intermediate},
                            seed + 100);
      Routed routed = empty_routing(random, shape.hidden);
      fill(random, routed);
      const auto got = expect_rows_of_any_call<float>(
          [&](Backend& other, const std::vector<std::int64_t>& rows) {
            return run(other, experts, routed.only(rows));
          });
      // The first and the last rows meet other numbers of rows in an expert.
      const std::vector<std::int64_t> sampled = {0, 64, 300, kMostRows - 1};
      expect_within(choose_rows(got, sampled, shape.hidden),
                    reference(experts, routed.only(sampled),
                              [this](double value) { return store_error(value); }),
                    shape.name());
    }
  }
};
KDTREE_TEST_ALL_BACKENDS(ExpertRowsTest);

std::int32_t& id_of(Routed& routed, std::int64_t row, std::int64_t place) {
  return routed.ids[static_cast<std::size_t>(row * routed.k + place)];
}

// Every expert has some of the rows, at any of their places.
TEST_P(ExpertRowsTest, RandomExperts) {
  expect_rows(1, [](Random& random, Routed& routed) {
    for (std::int64_t row = 0; row < kMostRows; ++row) {
      const auto order = random.permutation(kExperts);
      for (std::int64_t place = 0; place < kChosen; ++place) {
        id_of(routed, row, place) = order[static_cast<std::size_t>(place)];
      }
    }
  });
}

// One expert has as many rows as the call.
TEST_P(ExpertRowsTest, AllRowsAtOneExpert) {
  expect_rows(2, [](Random& /*random*/, Routed& routed) {
    for (std::int64_t row = 0; row < kMostRows; ++row) {
      id_of(routed, row, row % kChosen) = 4;
    }
  });
}

// Expert 0 lies in the last slot, the others have none.
TEST_P(ExpertRowsTest, AllRowsAtTheLastSlot) {
  expect_rows(3, [](Random& /*random*/, Routed& routed) {
    for (std::int64_t row = 0; row < kMostRows; ++row) {
      id_of(routed, row, 3) = 0;
      id_of(routed, row, 5) = kExperts - 1;  // on another rank
    }
  });
}

// Experts that nobody chose lie between those that have many rows and one that has a single one.
TEST_P(ExpertRowsTest, EmptyExpertsBetween) {
  expect_rows(4, [](Random& random, Routed& routed) {
    for (std::int64_t row = 0; row < kMostRows; ++row) {
      id_of(routed, row, 0) = random.below(4) == 0 ? 1 : 6;
      id_of(routed, row, 7) = 8;
    }
    id_of(routed, kMostRows - 1, 4) = 3;
  });
}

// As many rows at an expert as lie around the borders of tiles, in one call: the last rows have all
// experts, so that shorter calls cut the numbers down.
TEST_P(ExpertRowsTest, RowsAroundTheBordersOfTiles) {
  for (const std::array<std::int64_t, kChosen>& counts :
       {std::array<std::int64_t, kChosen>{512, 128, 65, 64, 33, 32, 17, 16},
        std::array<std::int64_t, kChosen>{1, 2, 7, 8, 9, 15, 31, 63}}) {
    expect_rows(5, [&](Random& /*random*/, Routed& routed) {
      for (std::int64_t place = 0; place < kChosen; ++place) {
        for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(place)]; ++i) {
          id_of(routed, kMostRows - 1 - i, place) = static_cast<std::int32_t>(place);
        }
      }
    });
  }
}

// One expert with 1 to 130 rows: every place in the last tile, whatever its size.
TEST_P(ExpertRowsTest, EveryNumberOfRowsOfAnExpert) {
  constexpr WeightKind kPacked = {WeightFormat::kInt4Group, 32, DType::kBFloat16};
  constexpr std::int64_t kHidden = 256;
  Random random(6);
  const Experts experts(backend(), kPacked, {2, kHidden, 128}, 7);
  const Routed routed = {.k = 1,
                         .x = activations(random, 130 * kHidden),
                         .ids = std::vector<std::int32_t>(130, 1),
                         .weights = random.floats(130, 0, 1),
                         .slot_of = {0, 1}};
  std::vector<std::int64_t> rows(130);
  std::iota(rows.begin(), rows.end(), 0);
  const auto want = run(backend(), experts, routed);
  expect_within(want,
                reference(experts, routed, [this](double value) { return store_error(value); }),
                "130 rows");
  while (rows.size() > 1) {
    rows.erase(rows.begin());
    expect_same_bits(run(once(), experts, routed.only(rows)), choose_rows(want, rows, kHidden),
                     std::to_string(rows.size()) + " rows");
  }
}

}  // namespace
}  // namespace kdtree::ops_test
