// Generated checkpoints that all ranks read: rank 0 writes them, and they go away with the object.
#pragma once

#include <optional>
#include <string>

#include "tests/mpi/world.h"
#include "tests/unit/checkpoint_builder.h"
#include "tests/unit/weights_test_support.h"

namespace kdtree {

// Made and destroyed by all ranks together.
class SharedCheckpoint {
 public:
  using Write = void (*)(const CheckpointRecipe& recipe, const std::string& path);
  // `name` is the file's or directory's, which `write` makes.
  SharedCheckpoint(const CheckpointRecipe& recipe, const std::string& name, Write write) {
    run_together(world().group, [&] {
      if (world().is_root()) {
        path_ = folder_.emplace() / name;
        write(recipe, path_);
      }
    });
    auto size = static_cast<std::int64_t>(path_.size());
    world().group.broadcast(&size, sizeof size, 0);
    path_.resize(static_cast<std::size_t>(size));
    world().group.broadcast(path_.data(), size, 0);
  }
  SharedCheckpoint(const SharedCheckpoint&) = delete;
  SharedCheckpoint& operator=(const SharedCheckpoint&) = delete;
  ~SharedCheckpoint() { world().group.barrier(); }

  const std::string& path() const { return path_; }

 private:
  std::optional<TemporaryFolder> folder_;  // rank 0 only
  std::string path_;
};

class SharedBundle : public SharedCheckpoint {
 public:
  explicit SharedBundle(const CheckpointRecipe& recipe)
      : SharedCheckpoint(recipe, "model.kdtr", write_bundle) {}
};

// As Hugging Face has it; the drafter under path() + "/draft".
class SharedDirectory : public SharedCheckpoint {
 public:
  explicit SharedDirectory(const CheckpointRecipe& recipe)
      : SharedCheckpoint(recipe, "model", write_directory) {}
};

}  // namespace kdtree
