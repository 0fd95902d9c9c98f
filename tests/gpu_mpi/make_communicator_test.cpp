// Which communicator comes for tensors on GPUs, and what is refused.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "comm/staged/cuda_call.h"
#include "tests/gpu_mpi/gpu_case.h"
#include "tests/gpu_mpi/gpu_world.h"

namespace kdtree {
namespace {

class MakeGpuCommunicator : public testing::Test {
 protected:
  void SetUp() override {
    if (!gpu_world().has_gpu()) {
      GTEST_SKIP() << "a rank sees no GPU";
    }
  }
  void TearDown() override {
    if (gpu_world().has_gpu()) {
      gpu_world().use_own_gpu();
    }
  }
};

TEST_F(MakeGpuCommunicator, AutoIsNcclForSeveralRanksAndSelfForOne) {
  if (!gpu_world().has_gpu_for_each()) {
    GTEST_SKIP() << "ranks share a GPU";
  }
  // Twice: the first is ended in good order.
  for (int i = 0; i < 2; ++i) {
    const auto communicator =
        make_communicator({.name = "auto", .backend = "cuda"}, gpu_world().group());
    EXPECT_EQ(communicator->name(), gpu_world().size() == 1 ? "self" : "nccl");
    EXPECT_EQ(communicator->rank(), gpu_world().rank());
    EXPECT_EQ(communicator->world_size(), gpu_world().size());
    EXPECT_TRUE(communicator->capturable());
  }
}

TEST_F(MakeGpuCommunicator, TwoRanksOnOneGpuAreRefusedWithTheWayOut) {
  if (gpu_world().group().local_size() < 2) {
    GTEST_SKIP() << "one rank on this host";
  }
  check_cuda(cudaSetDevice(0), "cudaSetDevice");
  for (const char* name : {"auto", "nccl"}) {
    std::string error;
    try {
      make_communicator({.name = name, .backend = "cuda"}, gpu_world().group());
    } catch (const AgreedError& refusal) {
      error = refusal.what();
    }
    EXPECT_NE(error.find("share GPU"), std::string::npos) << name << ": \"" << error << "\"";
    EXPECT_NE(error.find("--communicator mpi"), std::string::npos) << name << ": " << error;
  }
}

TEST_F(MakeGpuCommunicator, NcclIsForTensorsOnGpus) {
  EXPECT_THROW(check_communicator({.name = "nccl", .backend = "cpu"}, gpu_world().group()),
               InputError);
}

TEST_F(MakeGpuCommunicator, StagedRefusesToBeCaptured) {
  Communicator& communicator = gpu_world().communicator("mpi");
  EXPECT_EQ(communicator.name(), "mpi");
  EXPECT_FALSE(communicator.capturable());
  GpuCase test(communicator, "capture");
  const TestTensor& x = test.tensor(DType::kFloat32, Shape{4}, Bytes(16));
  const TestStream stream;
  check_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
             "cudaStreamBeginCapture");
  EXPECT_THROW(communicator.all_reduce_sum(x.view(), stream.stream(), {}), Error);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream.get(), &graph), cudaSuccess)
      << "the refusal spoilt the capture";
  if (graph != nullptr) {
    cudaGraphDestroy(graph);
  }
}

}  // namespace
}  // namespace kdtree
