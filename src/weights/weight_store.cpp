#include "weights/weight_store.h"

#include <utility>

#include "core/check.h"

namespace kdtree {

const WeightView& WeightStore::matrix(const std::string& name) const {
  const auto found = matrices_.find(name);
  check(found != matrices_.end(), "matrix {} was not loaded", name);
  return found->second;
}

ConstTensorView WeightStore::vector(const std::string& name) const {
  const auto found = vectors_.find(name);
  check(found != vectors_.end(), "vector {} was not loaded", name);
  return found->second;
}

bool WeightStore::contains(const std::string& name) const {
  return matrices_.contains(name) || vectors_.contains(name);
}

void WeightStore::add_matrix(const std::string& name, WeightView view, std::vector<Buffer> memory) {
  check(!contains(name), "{} is added twice", name);
  matrices_.emplace(name, view);
  for (Buffer& buffer : memory) {
    add_memory(std::move(buffer));
  }
}

void WeightStore::add_vector(const std::string& name, ConstTensorView view, Buffer memory) {
  check(!contains(name), "{} is added twice", name);
  vectors_.emplace(name, view);
  add_memory(std::move(memory));
}

void WeightStore::rename_matrix(const std::string& name, const std::string& new_name) {
  check(!contains(new_name), "{} is there already", new_name);
  auto entry = matrices_.extract(name);
  check(!entry.empty(), "{} was not loaded", name);
  entry.key() = new_name;
  matrices_.insert(std::move(entry));
}

void WeightStore::add_memory(Buffer memory) {
  if (memory.data() != nullptr) {
    bytes_ += memory.bytes();
    memory_.push_back(std::move(memory));
  }
}

}  // namespace kdtree
