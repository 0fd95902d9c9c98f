// Every collective on device tensors against expected values: sizes 0, 1, odd and large, uneven
// counts, every element type; called directly and from CUDA graphs.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/gpu_mpi/gpu_case.h"
#include "tests/gpu_mpi/gpu_world.h"

namespace kdtree {
namespace {

constexpr CollectiveLabel kLabel{"test", 3};
constexpr std::array kAllTypes{DType::kFloat32,    DType::kBFloat16, DType::kFloat16,
                               DType::kFloat8E4M3, DType::kInt64,    DType::kInt32,
                               DType::kUInt8};
// Rows; the last makes 64 MB of float32 with rows of 16.
constexpr std::int64_t kLargeRows = std::int64_t{1} << 20;
constexpr std::int64_t kWidth = 16;

class GpuCollectives : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const std::string obstacle = gpu_world().obstacle(library());
    if (!obstacle.empty()) {
      GTEST_SKIP() << obstacle;
    }
    communicator_ = &gpu_world().communicator(library());
    if (library() != GetParam()) {
      const int rank = gpu_world().rank();
      part_ = communicator_->split(GetParam().ends_with("_pairs") ? rank / 2 : rank % 2);
      communicator_ = part_.get();
    }
  }

  // "nccl" of "nccl_pairs".
  static std::string library() { return GetParam().substr(0, GetParam().find('_')); }
  int rank() const { return communicator_->rank(); }
  int size() const { return communicator_->world_size(); }
  Communicator& communicator() const { return *communicator_; }
  std::string name_of(const char* collective, DType dtype, std::int64_t rows) const {
    return fmt::format("{} of {} with {} rows", collective, dtype_name(dtype), rows);
  }

  // Whether addition runs in rank order and in float32.
  bool in_rank_order() const { return library() != "nccl"; }

  void sum_whole_numbers(std::int64_t count, DType dtype);
  void sum_random_numbers(std::int64_t count, DType dtype);
  void broadcast(std::int64_t rows, DType dtype, int root);
  void gather(std::int64_t rows, DType dtype, bool in_place);
  void gather_rows(const std::vector<std::int64_t>& rows, DType dtype, bool in_place = false);
  void scatter_sums(const std::vector<std::int64_t>& rows, DType dtype);
  void exchange(const std::vector<std::int64_t>& rows_of_pair, DType dtype);

 private:
  Communicator* communicator_ = nullptr;
  std::unique_ptr<Communicator> part_;
};

Bytes concatenate(const std::vector<Bytes>& parts) {
  Bytes whole;
  for (const Bytes& part : parts) {
    whole.insert(whole.end(), part.begin(), part.end());
  }
  return whole;
}

Bytes zeros(std::int64_t count) {
  return Bytes(static_cast<std::size_t>(count));
}

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

// Stored as dtype, float32 or bfloat16.
Bytes floats_as(const std::vector<float>& values, DType dtype) {
  if (dtype == DType::kFloat32) {
    return bytes_of(values);
  }
  std::vector<BFloat16> narrow;
  narrow.reserve(values.size());
  for (const float value : values) {
    narrow.push_back(BFloat16::from_float(value));
  }
  return bytes_of(narrow);
}

std::vector<float> floats_from(const Bytes& bytes, DType dtype) {
  if (dtype == DType::kFloat32) {
    return values_of<float>(bytes);
  }
  std::vector<float> values;
  for (const BFloat16 value : values_of<BFloat16>(bytes)) {
    values.push_back(value.to_float());
  }
  return values;
}

// ---- all_reduce_sum

// Small whole numbers: any order of addition is exact in both types.
void GpuCollectives::sum_whole_numbers(std::int64_t count, DType dtype) {
  const auto value = [](int r, std::int64_t i) {
    return static_cast<float>((i * 7 + r * 3) % 17 - 8);
  };
  std::vector<float> own(at(count));
  std::vector<float> sums(at(count));
  for (std::int64_t i = 0; i < count; ++i) {
    own[at(i)] = value(rank(), i);
    for (int r = 0; r < size(); ++r) {
      sums[at(i)] += value(r, i);
    }
  }
  GpuCase test(communicator(), name_of("all_reduce_sum", dtype, count));
  TestTensor& x = test.tensor(dtype, Shape{count}, floats_as(own, dtype));
  test.expect(x, floats_as(sums, dtype));
  test.run([&](Stream stream) { communicator().all_reduce_sum(x.view(), stream, kLabel); });
}

// Random numbers: repeatable, the same on all ranks, within the rounding of the additions; in rank
// order where that is promised.
void GpuCollectives::sum_random_numbers(std::int64_t count, DType dtype) {
  std::vector<std::vector<float>> values(at(size()));
  for (int r = 0; r < size(); ++r) {
    std::mt19937 random(static_cast<unsigned>(1 + r));
    std::normal_distribution<float> normal;
    std::vector<float> exact(at(count));
    std::generate(exact.begin(), exact.end(), [&] { return normal(random); });
    values[at(r)] = floats_from(floats_as(exact, dtype), dtype);
  }
  GpuCase test(communicator(), name_of("all_reduce_sum (random)", dtype, count));
  TestTensor& x = test.tensor(dtype, Shape{count}, floats_as(values[at(rank())], dtype));
  std::vector<float> sums = values[0];
  for (int r = 1; r < size(); ++r) {
    for (std::int64_t i = 0; i < count; ++i) {
      sums[at(i)] += values[at(r)][at(i)];
    }
  }
  if (in_rank_order()) {
    test.expect(x, floats_as(sums, dtype));
  } else {
    test.expect_repeatable(x);
  }
  test.run([&](Stream stream) { communicator().all_reduce_sum(x.view(), stream, kLabel); });

  const Bytes result = test.result(x);
  Bytes all(result.size() * at(size()));
  gpu_world().group().all_gather(result.data(), static_cast<std::int64_t>(result.size()),
                                 all.data());
  const std::vector<float> found = floats_from(result, dtype);
  // Each of the size - 1 additions, and a last rounding, is off by at most half an ulp of a partial
  // sum, which is no larger than the sum of the magnitudes (and grown roundings: twice covers
  // them).
  const double epsilon = dtype == DType::kFloat32 ? 0x1p-24 : 0x1p-8;
  for (std::int64_t i = 0; i < count; ++i) {
    double sum = 0;
    double magnitude = 0;
    for (const std::vector<float>& of_rank : values) {
      sum += of_rank[at(i)];
      magnitude += std::abs(of_rank[at(i)]);
    }
    const double bound = 2 * size() * epsilon * magnitude;
    if (!(std::abs(found[at(i)] - sum) <= bound)) {
      ADD_FAILURE() << fmt::format("rank {}: element {} of {} {}: {}, expected {} +- {}", rank(), i,
                                   count, dtype_name(dtype), found[at(i)], sum, bound);
      break;
    }
  }
  for (int r = 0; r < size(); ++r) {
    EXPECT_EQ(std::memcmp(all.data() + at(r) * result.size(), result.data(), result.size()), 0)
        << "ranks " << rank() << " and " << r << " have different sums, " << count << " of "
        << dtype_name(dtype);
  }
}

TEST_P(GpuCollectives, AllReduceSumIsExactOnWholeNumbers) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t count : {0, 1, 3, 1001, 7168, 65543}) {
      sum_whole_numbers(count, dtype);
    }
  }
}

TEST_P(GpuCollectives, AllReduceSumIsTheSameOnAllRanksAndInEveryRun) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t count : {1, 7, 7168, 16 * 7168, 1000003}) {
      sum_random_numbers(count, dtype);
    }
  }
}

TEST_P(GpuCollectives, AllReduceSumOfALargeTensor) {
  sum_whole_numbers(kLargeRows * kWidth, DType::kFloat32);
  sum_whole_numbers(kLargeRows * kWidth, DType::kBFloat16);
}

TEST_P(GpuCollectives, AllReduceSumRefusesOtherTypes) {
  GpuCase test(communicator(), "refusal");
  TestTensor& x = test.tensor(DType::kInt32, Shape{4}, zeros(16));
  if (GetParam() != "self") {
    EXPECT_THROW(communicator().all_reduce_sum(x.view(), {}, kLabel), Error);
  }
}

// ---- broadcast

void GpuCollectives::broadcast(std::int64_t rows, DType dtype, int root) {
  const std::int64_t bytes = rows * kWidth * dtype_bytes(dtype);
  GpuCase test(communicator(),
               fmt::format("{} from rank {}", name_of("broadcast", dtype, rows), root));
  TestTensor& x = test.tensor(dtype, Shape{rows, kWidth}, pattern_bytes(rank(), 0, bytes));
  test.expect(x, pattern_bytes(root, 0, bytes));
  test.run([&](Stream stream) { communicator().broadcast(x.view(), root, stream, kLabel); });
}

TEST_P(GpuCollectives, Broadcast) {
  for (int root = 0; root < size(); ++root) {
    for (const DType dtype : kAllTypes) {
      for (const std::int64_t rows : {0, 1, 101}) {
        broadcast(rows, dtype, root);
      }
    }
  }
  broadcast(kLargeRows, DType::kFloat32, size() - 1);
}

// ---- all_gather

void GpuCollectives::gather(std::int64_t rows, DType dtype, bool in_place) {
  const std::int64_t bytes = rows * kWidth * dtype_bytes(dtype);
  std::vector<Bytes> blocks;
  std::vector<Bytes> own_block;
  for (int r = 0; r < size(); ++r) {
    blocks.push_back(pattern_bytes(r, 0, bytes));
    own_block.push_back(in_place && r == rank() ? blocks.back() : zeros(bytes));
  }
  GpuCase test(communicator(),
               name_of(in_place ? "all_gather in place" : "all_gather", dtype, rows));
  TestTensor& whole = test.tensor(dtype, Shape{size() * rows, kWidth}, concatenate(own_block));
  TestTensor& apart = test.tensor(dtype, Shape{rows, kWidth}, blocks[at(rank())]);
  const TensorView part = in_place ? whole.view().rows(rank() * rows, rows) : apart.view();
  test.expect(whole, concatenate(blocks));
  test.expect(apart, blocks[at(rank())]);
  test.run([&](Stream stream) { communicator().all_gather(part, whole.view(), stream, kLabel); });
}

TEST_P(GpuCollectives, AllGather) {
  for (const bool in_place : {false, true}) {
    for (const DType dtype : kAllTypes) {
      for (const std::int64_t rows : {0, 1, 101}) {
        gather(rows, dtype, in_place);
      }
    }
    gather(kLargeRows / size(), DType::kFloat32, in_place);
  }
}

// ---- all_gather_rows

void GpuCollectives::gather_rows(const std::vector<std::int64_t>& rows, DType dtype,
                                 bool in_place) {
  const std::int64_t width = kWidth * dtype_bytes(dtype);
  std::vector<Bytes> blocks;
  std::vector<Bytes> own_block;
  std::int64_t total = 0;
  std::int64_t first = 0;
  for (int r = 0; r < size(); ++r) {
    blocks.push_back(pattern_bytes(r, 0, rows[at(r)] * width));
    own_block.push_back(in_place && r == rank() ? blocks.back() : zeros(rows[at(r)] * width));
    first += r < rank() ? rows[at(r)] : 0;
    total += rows[at(r)];
  }
  GpuCase test(communicator(), name_of("all_gather_rows", dtype, total));
  const TestTensor& apart = test.tensor(dtype, Shape{rows[at(rank())], kWidth}, blocks[at(rank())]);
  const TestTensor& whole = test.tensor(dtype, Shape{total, kWidth}, concatenate(own_block));
  const TensorView part = in_place ? whole.view().rows(first, rows[at(rank())]) : apart.view();
  test.expect(whole, concatenate(blocks));
  test.run([&](Stream stream) {
    communicator().all_gather_rows(part, whole.view(), rows, stream, kLabel);
  });
}

TEST_P(GpuCollectives, AllGatherRowsWithUnevenCounts) {
  for (const DType dtype : kAllTypes) {
    for (const std::int64_t unit : {0, 1, 37}) {
      std::vector<std::int64_t> growing;
      std::vector<std::int64_t> last_only;
      for (int r = 0; r < size(); ++r) {
        growing.push_back(r * unit);  // rank 0 has none
        last_only.push_back(r == size() - 1 ? unit : 0);
      }
      gather_rows(growing, dtype);
      gather_rows(growing, dtype, true);
      gather_rows(last_only, dtype);
    }
  }
  std::vector<std::int64_t> large;
  for (int r = 0; r < size(); ++r) {
    large.push_back(kLargeRows / size() + (r == 0 ? 3 : -r));
  }
  gather_rows(large, DType::kFloat32);
}

// ---- reduce_scatter_rows

// Small whole numbers: any order of addition is exact in both types.
void GpuCollectives::scatter_sums(const std::vector<std::int64_t>& rows, DType dtype) {
  std::int64_t total = 0;
  std::int64_t first = 0;
  for (int r = 0; r < size(); ++r) {
    first += r < rank() ? rows[at(r)] : 0;
    total += rows[at(r)];
  }
  const std::int64_t own = rows[at(rank())];
  std::vector<float> values(at(total * kWidth));
  std::vector<float> sums(at(own * kWidth));
  for (int r = 0; r < size(); ++r) {
    for (std::int64_t i = 0; i < total * kWidth; ++i) {
      const auto value = static_cast<float>((i * 5 + r * 7) % 19 - 9);
      if (r == rank()) {
        values[at(i)] = value;
      }
      if (i >= first * kWidth && i < (first + own) * kWidth) {
        sums[at(i - first * kWidth)] += value;
      }
    }
  }
  GpuCase test(communicator(), name_of("reduce_scatter_rows", dtype, total));
  const TestTensor& whole = test.tensor(dtype, Shape{total, kWidth}, floats_as(values, dtype));
  const TestTensor& part =
      test.tensor(dtype, Shape{own, kWidth}, zeros(own * kWidth * dtype_bytes(dtype)));
  test.expect(part, floats_as(sums, dtype));
  test.expect(whole, floats_as(values, dtype));
  test.run([&](Stream stream) {
    communicator().reduce_scatter_rows(whole.view(), part.view(), rows, stream, kLabel);
  });
}

TEST_P(GpuCollectives, ReduceScatterRowsWithUnevenCounts) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t unit : {0, 1, 37}) {
      std::vector<std::int64_t> growing;
      std::vector<std::int64_t> equal;
      for (int r = 0; r < size(); ++r) {
        growing.push_back(r * unit);  // rank 0 has none
        equal.push_back(unit);
      }
      scatter_sums(growing, dtype);
      scatter_sums(equal, dtype);
    }
  }
  scatter_sums(std::vector<std::int64_t>(at(size()), kLargeRows / size()), DType::kBFloat16);
}

// ---- all_to_all

// rows_of_pair[from * size + to]; tensors are two rows larger than what travels.
void GpuCollectives::exchange(const std::vector<std::int64_t>& rows_of_pair, DType dtype) {
  const std::int64_t width = kWidth * dtype_bytes(dtype);
  std::vector<std::int64_t> rows_to;
  std::vector<std::int64_t> rows_from;
  std::vector<Bytes> sent_blocks;
  std::vector<Bytes> received_blocks;
  std::int64_t num_sent = 2;
  std::int64_t num_received = 2;
  for (int r = 0; r < size(); ++r) {
    rows_to.push_back(rows_of_pair[at(rank() * size() + r)]);
    rows_from.push_back(rows_of_pair[at(r * size() + rank())]);
    sent_blocks.push_back(pattern_bytes(rank(), r, rows_to.back() * width));
    received_blocks.push_back(pattern_bytes(r, rank(), rows_from.back() * width));
    num_sent += rows_to.back();
    num_received += rows_from.back();
  }
  sent_blocks.push_back(zeros(2 * width));
  received_blocks.push_back(zeros(2 * width));
  GpuCase test(communicator(), name_of("all_to_all", dtype, num_sent - 2));
  const TestTensor& sent = test.tensor(dtype, Shape{num_sent, kWidth}, concatenate(sent_blocks));
  const TestTensor& received =
      test.tensor(dtype, Shape{num_received, kWidth}, zeros(num_received * width));
  test.expect(received, concatenate(received_blocks));
  test.expect(sent, sent.start());
  test.run([&](Stream stream) {
    communicator().all_to_all(sent.view(), received.view(), {rows_to, rows_from}, stream, kLabel);
  });
}

TEST_P(GpuCollectives, AllToAllWithEvenAndUnevenCounts) {
  const auto num_pairs = at(size() * size());
  for (const DType dtype : kAllTypes) {
    for (const std::int64_t unit : {0, 1, 37}) {
      exchange(std::vector<std::int64_t>(num_pairs, unit), dtype);
      std::vector<std::int64_t> uneven;
      std::vector<std::int64_t> to_last;
      for (int pair = 0; pair < size() * size(); ++pair) {
        uneven.push_back(pair % 3 * unit);  // some pairs have nothing for each other
        to_last.push_back(pair % size() == size() - 1 ? unit : 0);
      }
      exchange(uneven, dtype);
      exchange(to_last, dtype);
    }
  }
  exchange(std::vector<std::int64_t>(num_pairs, kLargeRows / size()), DType::kFloat32);
}

// ---- a step's worth

// As many as a step of a 61-layer model makes, in one graph, with a broadcast at either end.
TEST_P(GpuCollectives, ManyInARow) {
  constexpr std::int64_t kLayers = 61;
  constexpr std::int64_t kHidden = 7168;
  std::vector<float> own(at(kLayers * kHidden));
  std::vector<float> sums(own.size());
  for (std::int64_t i = 0; i < kLayers * kHidden; ++i) {
    own[at(i)] = static_cast<float>(rank() + i % 100);
    sums[at(i)] = static_cast<float>(size() * (size() - 1) / 2 + size() * (i % 100));
  }
  GpuCase test(communicator(), "61 layers");
  const TestTensor& x = test.tensor(DType::kFloat32, Shape{kLayers, kHidden}, bytes_of(own));
  const TestTensor& control = test.tensor(DType::kInt32, Shape{64}, pattern_bytes(rank(), 0, 256));
  const TestTensor& gathered =
      test.tensor(DType::kInt32, Shape{size() * 64}, zeros(std::int64_t{256} * size()));
  std::vector<Bytes> copies(at(size()), pattern_bytes(0, 0, 256));
  test.expect(x, bytes_of(sums));
  test.expect(gathered, concatenate(copies));
  test.run([&](Stream stream) {
    communicator().broadcast(control.view(), 0, stream, {"tree", -1});
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      communicator().all_reduce_sum(x.view().rows(layer, 1), stream, {"moe", layer});
    }
    communicator().all_gather(control.view(), gathered.view(), stream, {"acceptance", -1});
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuCollectives,
                         testing::Values("self", "mpi", "nccl", "self_pairs", "mpi_pairs",
                                         "nccl_pairs", "mpi_seconds", "nccl_seconds"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace kdtree
