// The tensors of a Hugging Face directory in a bundle's terms: what conversions rename, and what
// they must not lose by it.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "weights/container.h"
#include "weights/convert_content.h"

namespace kdtree {

// A tensor for copying, whatever its dtype.
ContentTensor content_tensor(const std::string& file, const std::string& name, const RawTensor& raw,
                             std::string bundle_name);
// Cuts `ending` off, if `name` has it.
bool take_ending(std::string& name, std::string_view ending);

// The tensors of a directory under their bundle names, and what became of the weight_shapes.
class DirectoryTensors {
 public:
  // `prefix` stands before all bundle names. `container` outlives the object.
  DirectoryTensors(const Container& container, std::string prefix);

  // Adds all but the weight_shapes, whose content is checked against the packed matrices;
  // dropped_prefix is cut off the front of every name. InputError for a shape that does not fit.
  void add_to(std::vector<ContentTensor>& tensors, const std::string& dropped_prefix);

  // "model." if every tensor's name begins with it, else empty.
  std::string common_prefix() const;

  // Of each packed matrix by its bundle name, the dtype of its weight_shape or "none".
  const std::map<std::string, std::string>& shapes() const { return shape_of_; }

 private:
  bool is_packed(const std::string& base) const;
  bool is_shape(std::string name) const;
  std::string bundle_name(const std::string& name) const;
  void check_shape(const std::string& file, std::string name, const RawTensor& raw);

  const Container& container_;
  std::string prefix_;
  std::map<std::string, const RawTensor*> all_;
  std::map<std::string, std::string> shape_of_;
};

}  // namespace kdtree
