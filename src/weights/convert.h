// Converting checkpoints: directories to bundles and back, rounding experts to INT4, shards for a
// number of ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kdtree {

struct ConvertOptions {
  std::string model = {};   // bundle or directory
  std::string draft = {};   // drafter instead of the model's own; may be empty
  std::string output = {};  // a bundle if it ends in ".kdtr", else a directory
  // > 0: routed experts that are stored as floats or fp8 become INT4 in groups of this size with
  // bf16 scales.
  std::int64_t group_size = 0;
  bool keep_originals = false;  // beside the INT4 ones
  // > 0: `output` becomes a directory of bundles, each with what one of so many ranks reads.
  int shard_for = 0;
  bool overwrite = false;
  int num_threads = 1;
  std::int64_t piece_bytes = std::int64_t{4} << 20;  // see max_staging_bytes()
  // Of a directory's safetensors files, as far as tensors are not larger.
  std::int64_t max_file_bytes = 5'000'000'000;
};

struct QuantizedTensor {
  std::string name;
  double relative_error = 0;  // QuantizationError::relative_frobenius
  double max_abs_error = 0;
};

struct ConvertReport {
  std::vector<std::string> files;  // paths of what holds tensors
  std::int64_t num_tensors = 0;    // written, those of all shards
  std::int64_t bytes = 0;          // of all files
  std::int64_t num_resumed = 0;    // of num_tensors, from a run that was interrupted
  double seconds = 0;
  std::vector<QuantizedTensor> quantized;
  std::vector<std::string> left_out;  // files of the model's directory that were not taken along
};

// Converts. Tensors are copied bit for bit but for those that are quantised. Nothing is at `output`
// before all of it is there; a run that is interrupted leaves a folder OUTPUT.partial, which an
// equal run continues (its tensors are read again and held against the journal's checksums) and
// another one replaces. Checksums of a bundle's tensors are verified on the way. InputError for
// what is wrong with the model, as loading would give it; if the output exists, or cannot be made;
// if nothing is left to quantise.
ConvertReport convert(const ConvertOptions& options);

}  // namespace kdtree
