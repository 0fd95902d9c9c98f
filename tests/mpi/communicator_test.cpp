// The communicator that the ranks have (self for one, mpi otherwise) and the process group.
#include "comm/communicator.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <numeric>

#include "tests/mpi/world.h"

namespace kdtree {

namespace {

using Floats = std::vector<float>;

// Numbers whose float32 sum depends on the order: magnitudes from 1e-6 to 1e8, both signs. The same
// for an index at every size.
float value_of(int rank, std::int64_t index) {
  std::uint64_t state =
      static_cast<std::uint64_t>(index) * 1000003 + static_cast<std::uint64_t>(rank);
  state = (state ^ (state >> 29)) * 0xbf58476d1ce4e5b9ULL;
  state ^= state >> 32;
  const float mantissa = 1.0F + static_cast<float>(state % 65536) / 65536.0F;
  const int exponent = static_cast<int>((state >> 16) % 47) - 20;
  return std::ldexp((state >> 40) % 2 == 0 ? mantissa : -mantissa, exponent);
}

Floats values_of(int rank, std::int64_t size) {
  Floats values(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i) {
    values[static_cast<std::size_t>(i)] = value_of(rank, i);
  }
  return values;
}

template <class T>
TensorView view_of(std::vector<T>& values, Shape shape) {
  return {values.data(), kDTypeOf<T>, shape};
}
template <class T>
TensorView view_of(std::vector<T>& values) {
  return view_of(values, Shape{static_cast<std::int64_t>(values.size())});
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

Stream stream() {
  return world().backend.stream();
}

Floats sum_in_rank_order(std::int64_t size) {
  Floats sum = values_of(0, size);
  for (int rank = 1; rank < world().size(); ++rank) {
    for (std::int64_t i = 0; i < size; ++i) {
      sum[static_cast<std::size_t>(i)] += value_of(rank, i);
    }
  }
  return sum;
}

TEST(CommunicatorOps, TheSumIsThatInRankOrderBitForBitAtEverySize) {
  const std::int64_t ranks = world().size();
  for (const std::int64_t size : {std::int64_t{0}, std::int64_t{1}, ranks - 1, ranks, ranks + 1,
                                  std::int64_t{1000}, std::int64_t{3000001}}) {
    Floats values = values_of(world().rank(), size);
    world().communicator.all_reduce_sum(view_of(values), stream(), {});
    EXPECT_TRUE(same_bits(values, sum_in_rank_order(size))) << "size " << size;
  }
}

// Without this the test above would also pass for another order of addition.
TEST(CommunicatorOps, TheValuesSumDifferentlyInAnotherOrder) {
  if (world().size() < 3) {
    GTEST_SKIP() << "two numbers have one sum";
  }
  const std::int64_t size = 1000;
  Floats reversed = values_of(world().size() - 1, size);
  for (int rank = world().size() - 2; rank >= 0; --rank) {
    for (std::int64_t i = 0; i < size; ++i) {
      reversed[static_cast<std::size_t>(i)] += value_of(rank, i);
    }
  }
  EXPECT_FALSE(same_bits(reversed, sum_in_rank_order(size)));
}

TEST(CommunicatorOps, AnElementsSumHasTheSameBitsInMessagesOfEverySize) {
  constexpr std::int64_t kCompared = 64;
  Floats first;
  for (const std::int64_t size : {64, 65, 257, 4096, 5003, 100000}) {
    Floats values = values_of(world().rank(), size);
    world().communicator.all_reduce_sum(view_of(values), stream(), {});
    values.resize(kCompared);
    first = first.empty() ? values : first;
    EXPECT_TRUE(same_bits(values, first)) << "size " << size;
  }
}

TEST(CommunicatorOps, SumsOfNegativeZeroAndSpecialValuesSurvive) {
  Floats values = {-0.0F, 1.0F / 0.0F, 0.0F / 0.0F, world().is_root() ? -0.0F : 0.0F};
  world().communicator.all_reduce_sum(view_of(values), stream(), {});
  EXPECT_EQ(std::bit_cast<std::uint32_t>(values[0]), 0x80000000U);
  EXPECT_EQ(values[1], 1.0F / 0.0F);
  EXPECT_TRUE(values[2] != values[2]);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(values[3]), world().size() == 1 ? 0x80000000U : 0U);
}

TEST(CommunicatorOps, BroadcastGivesEveryRankTheRootsValues) {
  for (int root = 0; root < world().size(); ++root) {
    for (const std::int64_t size : {0, 1, 1000, 200000}) {
      Floats values = values_of(world().rank(), size);
      world().communicator.broadcast(view_of(values), root, stream(), {});
      EXPECT_TRUE(same_bits(values, values_of(root, size))) << root << " " << size;
    }
  }
  std::vector<std::int32_t> ids = {world().rank(), -7};
  world().communicator.broadcast(view_of(ids), world().size() - 1, stream(), {});
  EXPECT_EQ(ids, (std::vector<std::int32_t>{world().size() - 1, -7}));
}

TEST(CommunicatorOps, GatheredBlocksComeInRankOrder) {
  const std::int64_t ranks = world().size();
  for (const std::int64_t size : {0, 1, 5, 3000}) {
    Floats expected;
    for (int rank = 0; rank < world().size(); ++rank) {
      const Floats block = values_of(rank, size);
      expected.insert(expected.end(), block.begin(), block.end());
    }
    Floats part = values_of(world().rank(), size);
    Floats whole(static_cast<std::size_t>(ranks * size), -1.0F);
    world().communicator.all_gather(view_of(part), view_of(whole, Shape{ranks, size}), stream(),
                                    {});
    EXPECT_TRUE(same_bits(whole, expected)) << size;

    // The part may be the whole's own block.
    Floats in_place(static_cast<std::size_t>(ranks * size), -1.0F);
    std::copy(part.begin(), part.end(), in_place.begin() + world().rank() * size);
    const TensorView view = view_of(in_place, Shape{ranks, size});
    world().communicator.all_gather(view.rows(world().rank(), 1), view, stream(), {});
    EXPECT_TRUE(same_bits(in_place, expected)) << size;
  }
}

// Rank r has (r * 2 + 3) % 4 rows: 3, 1, 3, 1, so also uneven parts; with `none`, rank 0 has none.
std::vector<std::int64_t> uneven_rows(bool none) {
  std::vector<std::int64_t> rows;
  for (int rank = 0; rank < world().size(); ++rank) {
    rows.push_back(none && rank == 0 ? 0 : (rank * 2 + 3) % 4);
  }
  return rows;
}

TEST(CommunicatorOps, ScatteredSumsHaveTheBitsOfTheSumOfAll) {
  for (const bool none : {false, true}) {
    for (const std::int64_t width : {1, 5, 1000}) {
      const std::vector<std::int64_t> rows = uneven_rows(none);
      const std::int64_t total = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
      const std::int64_t before =
          std::accumulate(rows.begin(), rows.begin() + world().rank(), std::int64_t{0});
      const std::int64_t own = rows[static_cast<std::size_t>(world().rank())];
      Floats whole = values_of(world().rank(), total * width);
      const Floats untouched = whole;
      Floats part(static_cast<std::size_t>(own * width), -1.0F);
      world().communicator.reduce_scatter_rows(view_of(whole, Shape{total, width}),
                                               view_of(part, Shape{own, width}), rows, stream(),
                                               {});
      const Floats sum = sum_in_rank_order(total * width);
      const Floats want(sum.begin() + before * width, sum.begin() + (before + own) * width);
      EXPECT_TRUE(same_bits(part, want)) << none << " " << width;
      EXPECT_TRUE(same_bits(whole, untouched)) << none << " " << width;
    }
  }
}

// Rows of rank `from` for rank `to`: uneven, and none for some pairs.
std::int64_t rows_between(int from, int to) {
  return (from * 3 + to * 2 + 1) % 4;
}

TEST(CommunicatorOps, GatheredUnevenRowsComeInRankOrder) {
  constexpr std::int64_t kWidth = 3;
  for (const bool all_empty : {false, true}) {
    std::vector<std::int64_t> rows;
    Floats expected;
    for (int rank = 0; rank < world().size(); ++rank) {
      rows.push_back(all_empty ? 0 : rows_between(rank, 1));
      const Floats part = values_of(rank, rows.back() * kWidth);
      expected.insert(expected.end(), part.begin(), part.end());
    }
    const std::int64_t own = rows[static_cast<std::size_t>(world().rank())];
    const std::int64_t total = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    Floats part = values_of(world().rank(), own * kWidth);
    Floats whole(static_cast<std::size_t>(total * kWidth), -1.0F);
    world().communicator.all_gather_rows(view_of(part, Shape{own, kWidth}),
                                         view_of(whole, Shape{total, kWidth}), rows, stream(), {});
    EXPECT_TRUE(same_bits(whole, expected));
  }
}

// Row `index` of what rank `from` has for rank `to`.
void append_row(std::vector<std::int32_t>& rows, int from, int to, std::int64_t index) {
  rows.insert(rows.end(), {from, to, static_cast<std::int32_t>(index)});
}

TEST(CommunicatorOps, ExchangedRowsArriveOnceInRankOrder) {
  constexpr std::int64_t kWidth = 3;
  for (const bool all_empty : {false, true}) {
    std::vector<std::int64_t> rows_to;
    std::vector<std::int64_t> rows_from;
    std::vector<std::int32_t> sent;
    std::vector<std::int32_t> expected;
    for (int rank = 0; rank < world().size(); ++rank) {
      rows_to.push_back(all_empty ? 0 : rows_between(world().rank(), rank));
      rows_from.push_back(all_empty ? 0 : rows_between(rank, world().rank()));
      for (std::int64_t i = 0; i < rows_to.back(); ++i) {
        append_row(sent, world().rank(), rank, i);
      }
      for (std::int64_t i = 0; i < rows_from.back(); ++i) {
        append_row(expected, rank, world().rank(), i);
      }
    }
    std::vector<std::int32_t> received(expected.size(), -1);
    world().communicator.all_to_all(
        view_of(sent, Shape{static_cast<std::int64_t>(sent.size()) / kWidth, kWidth}),
        view_of(received, Shape{static_cast<std::int64_t>(received.size()) / kWidth, kWidth}),
        {.rows_to = rows_to, .rows_from = rows_from}, stream(), {});
    EXPECT_EQ(received, expected);
  }
}

TEST(CommunicatorOps, CountsThatDoNotFitTheTensorsAreErrors) {
  Floats values(2, 0.0F);
  const std::vector<std::int64_t> too_many(static_cast<std::size_t>(world().size()), 5);
  const std::vector<std::int64_t> too_short;
  Communicator& communicator = world().communicator;
  const TensorView view = view_of(values, Shape{2, 1});
  EXPECT_THROW(communicator.all_gather_rows(view, view, too_many, stream(), {}), Error);
  EXPECT_THROW(communicator.all_gather_rows(view, view, too_short, stream(), {}), Error);
  EXPECT_THROW(communicator.all_to_all(view, view, {.rows_to = too_short, .rows_from = too_short},
                                       stream(), {}),
               Error);
}

TEST(CommunicatorOps, RanksAgreeOnWhatIsThere) {
  EXPECT_EQ(world().communicator.name(), world().size() == 1 ? "self" : "mpi");
  EXPECT_EQ(world().communicator.rank(), world().rank());
  EXPECT_EQ(world().communicator.world_size(), world().size());
  EXPECT_NO_THROW(check_communicator({.name = "auto", .backend = "cpu"}, world().group));
  EXPECT_NO_THROW(check_communicator({.name = "mpi", .backend = "cpu"}, world().group));
  EXPECT_THROW(check_communicator({.name = "nccl", .backend = "cpu"}, world().group), InputError);
  EXPECT_THROW(check_communicator({.name = "gloo", .backend = "cpu"}, world().group), InputError);
  if (world().size() == 1) {
    EXPECT_NO_THROW(check_communicator({.name = "self", .backend = "cpu"}, world().group));
  } else {
    EXPECT_THROW(check_communicator({.name = "self", .backend = "cpu"}, world().group), InputError);
  }
}

TEST(CommunicatorOps, MpiWorksForAnyNumberOfRanks) {
  const auto communicator = make_communicator({.name = "mpi", .backend = "cpu"}, world().group);
  EXPECT_EQ(communicator->name(), "mpi");
  Floats values = values_of(world().rank(), 77);
  communicator->all_reduce_sum(view_of(values), stream(), {});
  EXPECT_TRUE(same_bits(values, sum_in_rank_order(77)));
}

}  // namespace

}  // namespace kdtree
