#include "tests/gpu_mpi/gpu_case.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "comm/staged/cuda_call.h"

namespace kdtree {

namespace {

constexpr std::int64_t kGuardBytes = 256;
constexpr int kGuardByte = 0xA5;

}  // namespace

std::uint8_t pattern(int from, int to, std::int64_t i) {
  auto mixed = static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15ULL;
  mixed ^= static_cast<std::uint64_t>(from * 131 + to * 17 + 1) * 0xC2B2AE3D27D4EB4FULL;
  return static_cast<std::uint8_t>((mixed ^ (mixed >> 29)) >> 24);
}

Bytes pattern_bytes(int from, int to, std::int64_t count) {
  Bytes bytes(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    bytes[static_cast<std::size_t>(i)] = pattern(from, to, i);
  }
  return bytes;
}

TestStream::TestStream() {
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
             "cudaStreamCreateWithFlags");
}

TestStream::~TestStream() {
  cudaStreamDestroy(stream_);
}

void TestStream::synchronize() const {
  check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

TestTensor::TestTensor(DType dtype, const Shape& shape, const Bytes& start) : start_(start) {
  const std::int64_t bytes = shape.num_elements() * dtype_bytes(dtype);
  check(bytes == static_cast<std::int64_t>(start.size()), "{} bytes for a tensor of {}",
        start.size(), bytes);
  const auto whole = static_cast<std::size_t>(bytes + 2 * kGuardBytes);
  check_cuda(cudaMalloc(&memory_, whole), "cudaMalloc");
  check_cuda(cudaMemset(memory_, kGuardByte, whole), "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  view_ = {static_cast<std::byte*>(memory_) + kGuardBytes, dtype, shape};
}

TestTensor::~TestTensor() {
  cudaFree(memory_);
}

void TestTensor::reset(cudaStream_t stream) const {
  if (!start_.empty()) {
    check_cuda(
        cudaMemcpyAsync(view_.raw(), start_.data(), start_.size(), cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
  }
}

Bytes TestTensor::read(cudaStream_t stream) const {
  Bytes bytes(start_.size());
  if (!bytes.empty()) {
    check_cuda(
        cudaMemcpyAsync(bytes.data(), view_.raw(), bytes.size(), cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync");
  }
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return bytes;
}

bool TestTensor::guards_hold() const {
  Bytes before(static_cast<std::size_t>(kGuardBytes));
  Bytes behind(before.size());
  const auto* tail = static_cast<const std::byte*>(view_.raw()) + start_.size();
  check_cuda(cudaMemcpy(before.data(), memory_, before.size(), cudaMemcpyDeviceToHost),
             "cudaMemcpy");
  check_cuda(cudaMemcpy(behind.data(), tail, behind.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  const Bytes intact(before.size(), kGuardByte);
  return before == intact && behind == intact;
}

GpuCase::GpuCase(Communicator& communicator, std::string name)
    : communicator_(communicator), name_(std::move(name)) {}

TestTensor& GpuCase::tensor(DType dtype, const Shape& shape, const Bytes& start) {
  return tensors_.emplace_back(dtype, shape, start);
}

void GpuCase::expect(const TestTensor& tensor, Bytes expected) {
  expectations_.push_back({&tensor, std::move(expected)});
}

void GpuCase::expect_repeatable(const TestTensor& tensor) {
  expectations_.push_back({&tensor, std::nullopt});
}

Bytes GpuCase::result(const TestTensor& tensor) const {
  for (const Expectation& expectation : expectations_) {
    if (expectation.tensor == &tensor && expectation.bytes) {
      return *expectation.bytes;
    }
  }
  return {};
}

void GpuCase::run(const std::function<void(Stream)>& call) {
  for (const char* way : {"first call", "second call"}) {
    run_once(way, [&] { call(stream_.stream()); });
  }
  if (!communicator_.capturable()) {
    return;
  }
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeGlobal),
             "cudaStreamBeginCapture");
  call(stream_.stream());
  check_cuda(cudaStreamEndCapture(stream_.get(), &graph), "cudaStreamEndCapture");
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  for (const char* way : {"first replay of the graph", "second replay of the graph"}) {
    run_once(way, [&] {
      check_cuda(cudaGraphLaunch(executable, stream_.get()), "cudaGraphLaunch");
      communicator_.replayed(stream_.stream(), {"test graph", -1});
    });
  }
  check_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

void GpuCase::run_once(const std::string& way, const std::function<void()>& start) {
  for (const TestTensor& tensor : tensors_) {
    tensor.reset(stream_.get());
  }
  start();
  stream_.synchronize();
  compare(way);
}

void GpuCase::compare(const std::string& way) {
  const std::string place =
      fmt::format("rank {} of {}, communicator {}, {}, {}", communicator_.rank(),
                  communicator_.world_size(), communicator_.name(), name_, way);
  for (Expectation& expectation : expectations_) {
    const Bytes found = expectation.tensor->read(stream_.get());
    if (!expectation.bytes) {
      expectation.bytes = found;
    }
    const Bytes& expected = *expectation.bytes;
    const auto [at, other] = std::mismatch(found.begin(), found.end(), expected.begin());
    if (at != found.end()) {
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < found.size(); ++i) {
        wrong += found[i] != expected[i] ? 1 : 0;
      }
      const auto index = at - found.begin();
      ADD_FAILURE() << fmt::format(
          "{}: {} of {} bytes differ, the first is byte {} (element {}): {:#04x}, expected {:#04x}",
          place, wrong, found.size(), index,
          index / dtype_bytes(expectation.tensor->view().dtype()), *at, *other);
    }
  }
  for (const TestTensor& tensor : tensors_) {
    EXPECT_TRUE(tensor.guards_hold()) << place << ": wrote outside of a tensor";
  }
}

}  // namespace kdtree
