// The ranks that the tests run on. Every rank runs every test; results are usually checked on rank
// 0 alone. A test must make the same collective calls on every rank whatever it finds, so failures
// that end a test early (ASSERT) belong behind the last collective.
#pragma once

#include "comm/communicator.h"
#include "comm/process_group.h"
#include "kernels/backend.h"

namespace kdtree {

// Owned by main; there for the whole run.
struct World {
  ProcessGroup& group;
  Communicator& communicator;
  Backend& backend;

  int rank() const { return group.rank(); }
  int size() const { return group.world_size(); }
  bool is_root() const { return group.rank() == 0; }
};
World& world();

}  // namespace kdtree
