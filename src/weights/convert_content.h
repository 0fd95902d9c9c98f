// What a checkpoint holds, in a bundle's terms, whatever it is stored in: the middle of a
// conversion.
//
// A bundle that is made of a directory says so in "directory" of its header, with what it would
// otherwise lose:
//   "shape_dtype"     dtype of the weight_shape tensors, which bundles do not store ("I64"; "none"
//                     if there were none), and "shape_dtype_of": {NAME: dtype} where one differs
//   "drafter_prefix"  what all tensor names of the drafter began with ("model.")
// config.json itself is one of its files. A directory that is made of a bundle with goldens, or of
// one that was never a directory, has that bundle's header in kdtree.json: {"format": "kdtree
// bundle header", "version": 1, "header"}. A header with "goldens" alone adds them to any
// directory.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "weights/checkpoint.h"
#include "weights/container.h"
#include "weights/raw_tensor.h"

namespace kdtree {

struct ContentTensor {
  OutputTensor output;  // under its bundle name: "drafter." in front, NAME.qw and NAME.sc
  // Where its bytes are; dtype and shape are those of `output`, if DType and Shape know them.
  StoredTensor stored;
};

struct CheckpointContent {
  nlohmann::json header;                     // of a bundle, without "tensors"
  std::vector<ContentTensor> tensors;        // in the order of the files
  std::map<std::string, std::string> files;  // name ("drafter/config.json") and content
  std::vector<std::string> left_out;         // files of a directory that are not taken along
  bool experts_become_packed = false;        // routed experts of the target, on their way
  // Checked against what the models must have. Their tensors are the same ones under their
  // canonical names.
  TargetCheckpoint target;
  std::optional<DrafterCheckpoint> drafter;
};

// `draft` (may be empty): the drafter, instead of the model's own. InputError for whatever is wrong
// with the files, as loading would give it, but for the tensors' data.
CheckpointContent read_content(const std::string& model, const std::string& draft);

// The header's target.config or drafter.config ("target", "drafter") for a directory: with a
// quantization_config where there are packed tensors and the config does not say so.
nlohmann::json directory_config(const CheckpointContent& content, const char* part);
// The dtype of the weight_shape tensor of matrix `name`; none if it has none.
std::optional<DType> shape_dtype(const nlohmann::json& header, const std::string& name);
// kdtree.json for a directory of this content; empty if it needs none.
std::string directory_header(const CheckpointContent& content);

// "NAME.qw" as "NAME_packed", "NAME.sc" as "NAME_scale"; others as they are.
std::string directory_name(const std::string& bundle_name);

}  // namespace kdtree
