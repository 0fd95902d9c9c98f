// Modes of lost_rank.sh: what a rank does whose neighbour dies or does not come.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <thread>

#include "comm/staged/cuda_call.h"
#include "tests/gpu_mpi/gpu_case.h"
#include "tests/gpu_mpi/gpu_world.h"

namespace kdtree {

namespace {

constexpr int kNobodyEndedIt = 3;

void all_reduce_and_wait(Communicator& communicator, const TestTensor& x, const TestStream& stream,
                         const char* what) {
  communicator.all_reduce_sum(x.view(), stream.stream(), {what, 3});
  stream.synchronize();
}

}  // namespace

// "killed": rank 1 ends as by kill -9 while the others are in a collective. "late": rank 1 does not
// come to a collective. The watching threads are to end every other rank; main waits for that.
int run_lost_rank(const std::string& mode, GpuWorld& world) {
  if (world.size() < 2 || !world.obstacle("nccl").empty()) {
    fmt::print(stderr, "skipped: needs two ranks with a GPU each\n");
    return kSkipped;
  }
  Communicator& communicator = world.communicator("nccl");
  GpuCase tensors(communicator, mode);
  const TestTensor& x = tensors.tensor(DType::kFloat32, Shape{7168}, Bytes(4 * 7168));
  const TestStream stream;
  for (int i = 0; i < 3; ++i) {
    all_reduce_and_wait(communicator, x, stream, "together");
  }
  world.group().barrier();
  if (world.rank() == 1) {
    if (mode == "killed") {
      std::this_thread::sleep_for(std::chrono::seconds(1));  // until the others are in it
      std::raise(SIGKILL);
    }
    std::this_thread::sleep_for(std::chrono::seconds(60));
    return kNobodyEndedIt;
  }
  fmt::print(stderr, "rank {} waits\n", world.rank());
  std::fflush(stderr);
  all_reduce_and_wait(communicator, x, stream, "alone");
  std::this_thread::sleep_for(std::chrono::seconds(60));
  return kNobodyEndedIt;
}

}  // namespace kdtree
