// A generated bundle that all ranks read: rank 0 writes it, and it goes away with the object.
#pragma once

#include <optional>

#include "tests/mpi/world.h"
#include "tests/unit/checkpoint_builder.h"
#include "tests/unit/weights_test_support.h"

namespace kdtree {

// Made and destroyed by all ranks together.
class SharedBundle {
 public:
  explicit SharedBundle(const CheckpointRecipe& recipe) {
    run_together(world().group, [&] {
      if (world().is_root()) {
        path_ = folder_.emplace() / "model.kdtr";
        write_bundle(recipe, path_);
      }
    });
    auto size = static_cast<std::int64_t>(path_.size());
    world().group.broadcast(&size, sizeof size, 0);
    path_.resize(static_cast<std::size_t>(size));
    world().group.broadcast(path_.data(), size, 0);
  }
  SharedBundle(const SharedBundle&) = delete;
  SharedBundle& operator=(const SharedBundle&) = delete;
  ~SharedBundle() { world().group.barrier(); }

  const std::string& path() const { return path_; }

 private:
  std::optional<TemporaryFolder> folder_;  // rank 0 only
  std::string path_;
};

}  // namespace kdtree
