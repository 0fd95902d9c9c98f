// The ranks of a run and small values between their hosts. Tensors travel through
// comm/communicator.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/check.h"

namespace kdtree {

class ProcessGroup {
 public:
  ProcessGroup() = default;
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;
  virtual ~ProcessGroup() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // Index and number of the ranks on this host.
  virtual int local_rank() const = 0;
  virtual int local_size() const = 0;
  virtual std::string host_name() const = 0;

  // Collectives: every rank calls them in the same order with the same sizes.
  virtual void barrier() = 0;
  virtual void broadcast(void* data, std::int64_t bytes, int root) = 0;
  // received: world_size blocks of `bytes`, in rank order.
  virtual void all_gather(const void* sent, std::int64_t bytes, void* received) = 0;

  // Ends all ranks at once, without waiting for them, with this exit code. Does not return.
  [[noreturn]] virtual void abort(int exit_code) = 0;
};

// A group of one: the program started without mpirun or srun.
std::unique_ptr<ProcessGroup> make_self_process_group();

// A failure that every rank knows of and throws alike: one of them prints it and all can end in
// good order.
class AgreedError : public Error {
 public:
  using Error::Error;
};

// Runs `body` on every rank and lets all of them know how it went. Where it threw on any rank,
// every rank throws AgreedError; its text holds each distinct message once, with the ranks that had
// it unless all of them did, or rank 0 alone (it alone reads prompts). `body` must not call
// collectives.
void run_together(ProcessGroup& group, const std::function<void()>& body);

}  // namespace kdtree
