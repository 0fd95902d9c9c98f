// The ranks and GPUs that the tests run on. Every rank runs every test and makes the same
// collective calls whatever it finds: failures that end a test early (ASSERT) belong behind the
// last of them.
#pragma once

#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/process_group.h"

namespace kdtree {

class GpuWorld {
 public:
  // Collective. Makes GPU local_rank % devices current.
  explicit GpuWorld(ProcessGroup& group);

  ProcessGroup& group() const { return group_; }
  int rank() const { return group_.rank(); }
  int size() const { return group_.world_size(); }
  bool has_gpu() const { return fewest_devices_ > 0; }  // every rank sees one
  bool has_gpu_for_each() const { return distinct_; }
  // Makes this rank's own GPU current.
  void use_own_gpu() const;

  // Why communicator `name` (self, mpi, nccl) cannot run here, the same on every rank; empty if it
  // can.
  std::string obstacle(const std::string& name) const;
  // The communicator that make_communicator gives for `name` and backend cuda, made at the first
  // call, which is collective, and kept.
  Communicator& communicator(const std::string& name);
  // Ends them, collectively.
  void release();

 private:
  ProcessGroup& group_;
  int device_ = 0;
  int fewest_devices_ = 0;
  bool distinct_ = false;
  std::unique_ptr<Communicator> self_;
  std::unique_ptr<Communicator> mpi_;
  std::unique_ptr<Communicator> nccl_;
};

// Owned by main; there for the whole run.
GpuWorld& gpu_world();

// Runs one of the modes of lost_rank.sh instead of the tests; its exit code.
int run_lost_rank(const std::string& mode, GpuWorld& world);
constexpr int kSkipped = 77;  // exit code

}  // namespace kdtree
