// make_backend, and a backend's memory: allocate, upload, download, copy, fill_zero.
#include "tests/unit/op_test.h"

namespace kdtree::ops_test {
namespace {

std::string error_of(const BackendOptions& options) {
  try {
    make_backend(options);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(MakeBackendTest, NamesAndErrors) {
  EXPECT_EQ(make_backend({.name = "cpu", .num_threads = 2})->name(), "cpu");
  EXPECT_EQ(make_backend({.name = "cpu", .num_threads = 2})->num_threads(), 2);
  EXPECT_EQ(make_backend({.name = "cpu"})->activation_dtype(), DType::kFloat32);
  EXPECT_NE(error_of({.name = "tpu"}).find("tpu"), std::string::npos);
  EXPECT_NE(error_of({.name = "cpu", .num_threads = 0}).find("thread"), std::string::npos);
  const std::string no_cuda = error_of({.name = "cuda"});
  if (no_cuda.empty()) {
    EXPECT_EQ(make_backend({.name = "auto"})->name(), "cuda");
  } else {
    EXPECT_NE(no_cuda.find("CUDA"), std::string::npos);
    EXPECT_EQ(make_backend({.name = "auto"})->name(), "cpu");
  }
}

class MemoryTest : public OpTest {};
KDTREE_TEST_ALL_BACKENDS(MemoryTest);

TEST_P(MemoryTest, AllocationsAreAlignedAndZero) {
  for (const std::int64_t bytes : {0, 1, 255, 256, 257, 4096, 1 << 20}) {
    const Buffer buffer = backend().allocate(bytes);
    EXPECT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 256, 0U);
    std::vector<std::uint8_t> host(static_cast<std::size_t>(bytes), 1);
    backend().download(host.data(), buffer.data(), bytes);
    backend().synchronize();
    EXPECT_EQ(host, std::vector<std::uint8_t>(static_cast<std::size_t>(bytes), 0));
  }
  EXPECT_THROW(backend().allocate(-1), Error);
  EXPECT_GT(backend().free_bytes(), 0);
}

// Memory that was used and released comes back zeroed as well.
TEST_P(MemoryTest, ReusedMemoryIsZero) {
  for (int repeat = 0; repeat < 8; ++repeat) {
    const Buffer buffer = backend().allocate(5000);
    std::vector<std::uint8_t> host(5000, 1);
    backend().download(host.data(), buffer.data(), 5000);
    backend().synchronize();
    EXPECT_EQ(host, std::vector<std::uint8_t>(5000, 0));
    host.assign(5000, 0xEE);
    backend().upload(buffer.data(), host.data(), 5000);
    backend().synchronize();
  }
}

TEST_P(MemoryTest, UploadAndDownload) {
  const Buffer buffer = backend().allocate(8);
  const std::vector<std::uint8_t> sent = {1, 2, 3, 4, 5};
  backend().upload(static_cast<std::byte*>(buffer.data()) + 1, sent.data(), 5);
  backend().upload(buffer.data(), nullptr, 0);
  std::vector<std::uint8_t> got(8, 9);
  backend().download(got.data(), buffer.data(), 8);
  backend().synchronize();
  EXPECT_EQ(got, (std::vector<std::uint8_t>{0, 1, 2, 3, 4, 5, 0, 0}));
}

TEST_P(MemoryTest, CopyOfDenseAndStridedTensors) {
  Random random(1);
  for (const std::int64_t from_stride : {6, 9}) {
    for (const std::int64_t to_stride : {6, 7}) {
      const auto values = random.integers(30, 1000);
      GuardedTensor from(backend(), DType::kInt32, {5, 2, 3}, from_stride);
      GuardedTensor to(backend(), DType::kInt32, {5, 2, 3}, to_stride);
      from.upload(values);
      backend().copy(from.view(), to.view());
      EXPECT_EQ(to.download<std::int32_t>(), values);
      EXPECT_EQ(from.download<std::int32_t>(), values);
    }
  }
  GuardedTensor bytes(backend(), DType::kUInt8, {3});
  GuardedTensor other_bytes(backend(), DType::kUInt8, {3});
  bytes.upload(std::vector<std::uint8_t>{7, 8, 9});
  backend().copy(bytes.view(), other_bytes.view());
  EXPECT_EQ(other_bytes.download<std::uint8_t>(), (std::vector<std::uint8_t>{7, 8, 9}));
  GuardedTensor empty(backend(), DType::kInt32, {0, 4});
  backend().copy(empty.view(), empty.view());

  GuardedTensor floats(backend(), DType::kFloat32, {5, 2, 3});
  GuardedTensor integers(backend(), DType::kInt32, {5, 2, 3});
  GuardedTensor flat(backend(), DType::kInt32, {5, 6});
  EXPECT_THROW(backend().copy(integers.view(), floats.view()), Error);
  EXPECT_THROW(backend().copy(integers.view(), flat.view()), Error);
}

TEST_P(MemoryTest, FillZero) {
  GuardedTensor tensor(backend(), DType::kBFloat16, {3, 5});
  backend().fill_zero(tensor.view());
  for (const BFloat16 value : tensor.download<BFloat16>()) {
    EXPECT_EQ(value.bits, 0);
  }
  GuardedTensor empty(backend(), DType::kFloat32, {0, 5});
  backend().fill_zero(empty.view());
  GuardedTensor strided(backend(), DType::kFloat32, {3, 5}, 8);
  EXPECT_THROW(backend().fill_zero(strided.view()), Error);
}

}  // namespace
}  // namespace kdtree::ops_test
