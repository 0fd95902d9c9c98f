// Runs one collective in several ways and compares what it leaves in device memory, bit for bit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace kdtree {

using Bytes = std::vector<std::uint8_t>;

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!values.empty()) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  return bytes;
}

template <class T>
std::vector<T> values_of(const Bytes& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
  }
  return values;
}

// Byte i of what rank `from` has for rank `to`; neighbours, ranks and places differ.
std::uint8_t pattern(int from, int to, std::int64_t i);
Bytes pattern_bytes(int from, int to, std::int64_t count);

// A non-default stream.
class TestStream {
 public:
  TestStream();
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  ~TestStream();
  cudaStream_t get() const { return stream_; }
  Stream stream() const { return {stream_}; }
  void synchronize() const;

 private:
  cudaStream_t stream_ = nullptr;
};

// Device memory between two guards, with the bytes it starts from and those expected in the end.
class TestTensor {
 public:
  TestTensor(DType dtype, const Shape& shape, const Bytes& start);
  TestTensor(const TestTensor&) = delete;
  TestTensor& operator=(const TestTensor&) = delete;
  ~TestTensor();

  TensorView view() const { return view_; }
  const Bytes& start() const { return start_; }
  void reset(cudaStream_t stream) const;
  Bytes read(cudaStream_t stream) const;
  // Whether nothing was written outside of it.
  bool guards_hold() const;

 private:
  void* memory_ = nullptr;
  TensorView view_;
  Bytes start_;
};

// A collective with its tensors. Build it alike on all ranks, then run().
class GpuCase {
 public:
  // `name` says what it is: collective, type, size.
  GpuCase(Communicator& communicator, std::string name);

  // `start` fills the tensor before every run. Lives as long as the case.
  TestTensor& tensor(DType dtype, const Shape& shape, const Bytes& start);
  // The tensor's contents behind a run.
  void expect(const TestTensor& tensor, Bytes expected);
  // Those that are not known beforehand; they must be the same after every run.
  void expect_repeatable(const TestTensor& tensor);
  // What is left in a tensor of expect_repeatable, after run().
  Bytes result(const TestTensor& tensor) const;

  // Twice directly and, where the communicator can be captured, twice from a CUDA graph. Throws
  // nothing; differences are failures of the test that name rank, case, way and place.
  void run(const std::function<void(Stream)>& call);

 private:
  struct Expectation {
    const TestTensor* tensor;
    std::optional<Bytes> bytes;
  };
  void run_once(const std::string& way, const std::function<void()>& start);
  void compare(const std::string& way);

  Communicator& communicator_;
  std::string name_;
  TestStream stream_;
  std::deque<TestTensor> tensors_;
  std::vector<Expectation> expectations_;
};

}  // namespace kdtree
