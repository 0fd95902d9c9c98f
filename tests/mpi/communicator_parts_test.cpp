// Parts of the communicator that all ranks have: each works as one of its ranks alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "comm/communicator.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

constexpr std::int64_t kWidth = 3;

// How the ranks are divided: parts[rank] is the rank's part.
struct Division {
  const char* name;
  int (*part_of)(int rank);
};
constexpr Division kDivisions[] = {{"one part", [](int) { return 0; }},
                                   {"a part a rank", [](int rank) { return rank; }},
                                   {"neighbours", [](int rank) { return rank / 2; }},
                                   {"every second", [](int rank) { return rank % 2; }},
                                   {"the first apart", [](int rank) { return rank == 0 ? 7 : 3; }}};

std::vector<int> members(const Division& division) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world().size(); ++rank) {
    if (division.part_of(rank) == division.part_of(world().rank())) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

Stream part_stream() {
  return world().backend.stream();
}

// What rank `from` has for rank `to`, both of all ranks.
float sample_of(int from, int to, std::int64_t i) {
  return static_cast<float>(from * 1000 + to * 100) + static_cast<float>(i) / 7;
}

TensorView rows_of(std::vector<float>& values) {
  return {values.data(), DType::kFloat32, Shape{std::ssize(values) / kWidth, kWidth}};
}

std::vector<float> samples_of(int from, int to, std::int64_t rows) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < rows * kWidth; ++i) {
    values.push_back(sample_of(from, to, i));
  }
  return values;
}

void append(std::vector<float>& values, const std::vector<float>& more) {
  values.insert(values.end(), more.begin(), more.end());
}

void sum_and_broadcast(Communicator& part, const std::vector<int>& ranks) {
  std::vector<float> sum = samples_of(world().rank(), 0, 5);
  part.all_reduce_sum(rows_of(sum), part_stream(), {.what = "sum"});
  for (std::size_t i = 0; i < sum.size(); ++i) {
    float expected = sample_of(ranks.front(), 0, static_cast<std::int64_t>(i));
    for (std::size_t member = 1; member < ranks.size(); ++member) {
      expected += sample_of(ranks[member], 0, static_cast<std::int64_t>(i));
    }
    EXPECT_EQ(sum[i], expected) << i;
  }
  for (std::size_t root = 0; root < ranks.size(); ++root) {
    std::vector<float> values = samples_of(world().rank(), 1, 2);
    part.broadcast(rows_of(values), static_cast<int>(root), part_stream(), {.what = "broadcast"});
    EXPECT_EQ(values, samples_of(ranks[root], 1, 2));
  }
}

void gather(Communicator& part, const std::vector<int>& ranks, bool in_place) {
  std::vector<std::int64_t> rows;
  std::vector<float> even;
  std::vector<float> uneven;
  std::int64_t first = 0;
  for (const int rank : ranks) {
    first += rank < world().rank() ? rank % 3 : 0;
    rows.push_back(rank % 3);  // none of some
    append(even, samples_of(rank, 2, 4));
    append(uneven, samples_of(rank, 3, rank % 3));
  }
  std::vector<float> own = samples_of(world().rank(), 2, 4);
  std::vector<float> whole(even.size(), -1);
  part.all_gather(rows_of(own), rows_of(whole), part_stream(), {.what = "gather"});
  EXPECT_EQ(whole, even);

  own = samples_of(world().rank(), 3, world().rank() % 3);
  whole.assign(uneven.size(), -1);
  std::copy(own.begin(), own.end(), whole.begin() + first * kWidth);
  const TensorView all = rows_of(whole);
  const TensorView sent = in_place ? all.rows(first, world().rank() % 3) : rows_of(own);
  part.all_gather_rows(sent, all, rows, part_stream(), {.what = "gather rows"});
  EXPECT_EQ(whole, uneven);
}

void exchange(Communicator& part, const std::vector<int>& ranks) {
  std::vector<std::int64_t> rows_to;
  std::vector<std::int64_t> rows_from;
  std::vector<float> sent;
  std::vector<float> expected;
  for (const int rank : ranks) {
    rows_to.push_back((world().rank() + 2 * rank) % 3);
    rows_from.push_back((rank + 2 * world().rank()) % 3);
    append(sent, samples_of(world().rank(), rank, rows_to.back()));
    append(expected, samples_of(rank, world().rank(), rows_from.back()));
  }
  std::vector<float> received(expected.size(), -1);
  part.all_to_all(rows_of(sent), rows_of(received), {.rows_to = rows_to, .rows_from = rows_from},
                  part_stream(), {.what = "exchange"});
  EXPECT_EQ(received, expected);
}

TEST(CommunicatorParts, EachWorksAsOneOfItsRanksAlone) {
  for (const Division& division : kDivisions) {
    SCOPED_TRACE(division.name);
    const std::vector<int> ranks = members(division);
    const auto place = std::find(ranks.begin(), ranks.end(), world().rank()) - ranks.begin();
    const std::unique_ptr<Communicator> part =
        world().communicator.split(division.part_of(world().rank()));
    EXPECT_EQ(part->rank(), place);
    EXPECT_EQ(part->world_size(), std::ssize(ranks));
    EXPECT_EQ(part->name(), ranks.size() == 1 ? "self" : "mpi");
    sum_and_broadcast(*part, ranks);
    gather(*part, ranks, false);
    gather(*part, ranks, true);
    exchange(*part, ranks);
  }
}

// The calls of a layer: on all ranks, on rows of a grid, on its columns.
TEST(CommunicatorParts, CallsOnPartsAndOnTheWholeFollowEachOther) {
  Communicator& whole = world().communicator;
  const std::unique_ptr<Communicator> neighbours = whole.split(world().rank() / 2);
  const std::unique_ptr<Communicator> columns = whole.split(world().rank() % 2);
  const auto sum_of = [](Communicator& ranks) {
    std::vector<float> one = {1, static_cast<float>(world().rank()), 0};
    ranks.all_reduce_sum(rows_of(one), part_stream(), {.what = "count"});
    return one;
  };
  for (int layer = 0; layer < 20; ++layer) {
    const std::vector<float> all = sum_of(whole);
    const std::vector<float> row = sum_of(*neighbours);
    const std::vector<float> column = sum_of(*columns);
    EXPECT_EQ(all[0], static_cast<float>(world().size()));
    EXPECT_EQ(row[0], static_cast<float>(neighbours->world_size()));
    EXPECT_EQ(column[0], static_cast<float>(columns->world_size()));
  }
}

TEST(CommunicatorParts, ArePartsOfTheWholeAlone) {
  const std::unique_ptr<Communicator> part = world().communicator.split(0);
  if (world().size() > 1) {
    EXPECT_THROW(part->split(0), Error);
  }
  // A part that is gone leaves the whole as it was.
  std::vector<float> one = {1, 1, 1};
  world().communicator.all_reduce_sum(rows_of(one), part_stream(), {});
  EXPECT_EQ(one[0], static_cast<float>(world().size()));
}

}  // namespace

}  // namespace kdtree
