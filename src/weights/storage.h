// How the tensors of a checkpoint store what the table of specs asks for.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "weights/checkpoint.h"
#include "weights/tensor_spec.h"

namespace kdtree {

enum class StorageForm : std::uint8_t {
  kPlain,   // F32, BF16 or F16
  kFloat8,  // F8_E4M3 and a multiplier for each block of 128 x 128
  kInt4,    // packed words and a scale for each group
};

// One stored copy of a matrix or vector. Points into the checkpoint's table.
struct StoredCopy {
  StorageForm form = StorageForm::kPlain;
  const StoredTensor* values = nullptr;  // [out, in] or, packed, [out, in / 8]
  const StoredTensor* scales = nullptr;  // not for kPlain
  // [2] = (out, in) beside packed words, or nullptr. Its content is not checked here.
  const StoredTensor* packed_shape = nullptr;
  std::int64_t group_size = 0;  // kInt4 only
};

struct StoredCopies {
  std::optional<StoredCopy> original;   // plain or fp8
  std::optional<StoredCopy> quantized;  // INT4
};

class StorageResolver {
 public:
  // `table` must outlive the resolver and what it returns. `origin` is named where no file can be,
  // with name_prefix before the tensor's name.
  StorageResolver(const TensorTable& table, std::string origin, std::string name_prefix,
                  std::optional<QuantizationConfig> quantization);

  // The copies of one tensor, of which there is at least one unless spec.tied. InputError names
  // file and tensor: missing, wrong shape or dtype, scales without values and the like.
  StoredCopies resolve(const TensorSpec& spec);
  // InputError if the table holds a tensor that no resolve() asked for.
  void require_nothing_left() const;
  // How errors name a tensor that no file is known for.
  std::string place_of(const TensorSpec& spec) const;

 private:
  const StoredTensor* take(const std::string& name);
  StoredCopy int4_copy(const TensorSpec& spec, const StoredTensor& words,
                       const std::string& scales_name);
  StoredCopy original_copy(const TensorSpec& spec, const StoredTensor& values);

  const TensorTable& table_;
  std::string origin_;
  std::string name_prefix_;
  std::optional<QuantizationConfig> quantization_;
  std::set<const StoredTensor*> taken_;
};

}  // namespace kdtree
