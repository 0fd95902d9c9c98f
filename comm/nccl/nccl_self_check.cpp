#include "comm/nccl/nccl_self_check.h"

#include <cstddef>
#include <vector>

#include "comm/staged/cuda_call.h"

namespace kdtree {

namespace {

constexpr CollectiveLabel kLabel{"check at the start", -1};

// Device memory and a stream, for as long as the check takes.
class Bench {
 public:
  explicit Bench(std::int64_t count) : count_(count) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
               "cudaStreamCreateWithFlags");
    check_cuda(cudaMalloc(&memory_, 2 * bytes()), "cudaMalloc");
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench() {
    cudaFree(memory_);
    cudaStreamDestroy(stream_);
  }

  Stream stream() const { return {stream_}; }
  TensorView first(std::int64_t count) const { return {memory_, DType::kFloat32, Shape{count}}; }
  TensorView second(std::int64_t count) const {
    return {static_cast<std::byte*>(memory_) + bytes(), DType::kFloat32, Shape{count}};
  }
  void write(const TensorView& tensor, const std::vector<float>& values) const {
    check_cuda(cudaMemcpyAsync(tensor.raw(), values.data(), values.size() * sizeof(float),
                               cudaMemcpyHostToDevice, stream_),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  std::vector<float> read(const TensorView& tensor) const {
    std::vector<float> values(static_cast<std::size_t>(tensor.num_elements()));
    check_cuda(cudaMemcpyAsync(values.data(), tensor.raw(), values.size() * sizeof(float),
                               cudaMemcpyDeviceToHost, stream_),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return values;
  }

 private:
  std::size_t bytes() const { return static_cast<std::size_t>(count_) * sizeof(float); }

  std::int64_t count_;
  void* memory_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

// What rank `from` sends to rank `to` at place i: small whole numbers, exact in every sum.
float sample(int from, int to, std::int64_t i) {
  return static_cast<float>(1 + from * 64 + to + (i % 61) * 4096);
}

// The values that `from` has for `to`.
std::vector<float> samples(int from, int to, std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    values[static_cast<std::size_t>(i)] = sample(from, to, i);
  }
  return values;
}

// What `make(r)` gives for every rank, one behind the other.
template <class Make>
std::vector<float> of_all_ranks(int world_size, const Make& make) {
  std::vector<float> values;
  for (int rank = 0; rank < world_size; ++rank) {
    const std::vector<float> part = make(rank);
    values.insert(values.end(), part.begin(), part.end());
  }
  return values;
}

void require_equal(const std::vector<float>& found, const std::vector<float>& expected,
                   const Communicator& communicator, const char* call) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    check(
        found[i] == expected[i],
        "{} of {} elements over {} delivered wrong data to rank {}: element {} is {}, not {}. The "
        "GPUs do not reach each other as they claim; NCCL_P2P_DISABLE=1 goes round that",
        call, expected.size(), communicator.name(), communicator.rank(), i, found[i], expected[i]);
  }
}

void check_size(Communicator& communicator, const Bench& bench, std::int64_t count) {
  const int rank = communicator.rank();
  const int world_size = communicator.world_size();
  const Stream stream = bench.stream();

  const TensorView sum = bench.first(count);
  bench.write(sum, samples(rank, 0, count));
  communicator.all_reduce_sum(sum, stream, kLabel);
  std::vector<float> expected(static_cast<std::size_t>(count));
  for (int other = 0; other < world_size; ++other) {
    for (std::int64_t i = 0; i < count; ++i) {
      expected[static_cast<std::size_t>(i)] += sample(other, 0, i);
    }
  }
  require_equal(bench.read(sum), expected, communicator, "all_reduce_sum");

  const TensorView whole = bench.second(count * world_size);
  bench.write(bench.first(count), samples(rank, 1, count));
  communicator.all_gather(bench.first(count), whole, stream, kLabel);
  require_equal(bench.read(whole),
                of_all_ranks(world_size, [&](int r) { return samples(r, 1, count); }), communicator,
                "all_gather");

  for (int root = 0; root < world_size; ++root) {
    bench.write(bench.first(count), samples(rank, 2, count));
    communicator.broadcast(bench.first(count), root, stream, kLabel);
    require_equal(bench.read(bench.first(count)), samples(root, 2, count), communicator,
                  "broadcast");
  }

  const std::vector<std::int64_t> rows(static_cast<std::size_t>(world_size), count);
  const TensorView sent = bench.first(count * world_size);
  bench.write(sent, of_all_ranks(world_size, [&](int r) { return samples(rank, r, count); }));
  communicator.all_to_all(sent, whole, {rows, rows}, stream, kLabel);
  require_equal(bench.read(whole),
                of_all_ranks(world_size, [&](int r) { return samples(r, rank, count); }),
                communicator, "all_to_all");
}

}  // namespace

void check_delivery(Communicator& communicator) {
  constexpr std::int64_t kSmall = 7;
  constexpr std::int64_t kLarge = std::int64_t{1} << 18;
  const Bench bench(kLarge * communicator.world_size());
  for (const std::int64_t count : {kSmall, kLarge}) {
    check_size(communicator, bench, count);
  }
}

}  // namespace kdtree
