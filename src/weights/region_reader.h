// Reads one region of a load plan in pieces of bounded size, converted for the device.
#pragma once

#include <xxhash.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "weights/file.h"
#include "weights/load_plan.h"
#include "weights/number_formats.h"

namespace kdtree {

// A part of a region, counted from the region's first row and column: whole rows, or some columns
// of one row.
struct RegionPiece {
  Range rows;
  Range columns;
};

// The open files of a checkpoint. Safe from several threads once made. Every byte of a tensor that
// a load reads is read and counted here.
class FileSet {
 public:
  enum class Purpose : std::uint8_t { kContent, kChecksumOnly };

  FileSet() = default;
  // Opens every file that the plan reads.
  explicit FileSet(const LoadPlan& plan);
  // Opens the tensor's file, unless the tensor is none or random. Not while others read.
  void open(const StoredTensor* tensor);
  // Fills `target` with bytes [offset, offset + bytes) of the tensor.
  void read(const StoredTensor& tensor, std::int64_t offset, std::int64_t bytes, void* target,
            Purpose purpose = Purpose::kContent) const;
  // If the piece is a part of several rows, has the system begin to read them, what lies between
  // them included: many small reads with gaps would wait for the disk one by one. Pieces without
  // gaps are large enough by themselves.
  void will_need(const LoadRegion& region, const RegionPiece& piece) const;
  // Bytes that read() has read so far, and how many of them for a checksum alone.
  std::int64_t bytes_read() const { return bytes_read_; }
  std::int64_t checksum_bytes() const { return checksum_bytes_; }

 private:
  std::map<std::string, std::unique_ptr<InputFile>> files_;
  mutable std::atomic<std::int64_t> bytes_read_{0};
  mutable std::atomic<std::int64_t> checksum_bytes_{0};
};

// XXH3-64 of a tensor that is read piece by piece, from its first byte to its last.
class StreamingChecksum {
 public:
  StreamingChecksum();
  void add(const void* data, std::int64_t bytes);
  std::uint64_t value() const;  // of the bytes so far
  // InputError, naming file and tensor, unless the bytes so far give tensor.checksum.
  void verify(const StoredTensor& tensor) const;

 private:
  struct Free {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Free> state_;
};

// Reads all of a tensor, `piece_bytes` at a time, and verifies its checksum.
void verify_tensor(const FileSet& files, const StoredTensor& tensor, std::int64_t piece_bytes);

// The elements of a block that the file holds, row after row without gaps.
void read_rows(const FileSet& files, const StoredTensor& tensor, const StoredSlice& block,
               void* out);

// InputError, naming file, tensor and place, if one of `values` is negative, infinite or no number:
// no quantiser writes such a scale. `values` are rows of `columns` scales, the first of them at
// (first_row, first_column) of the stored tensor.
void check_scales(const StoredTensor& scales, std::span<const float> values, std::int64_t columns,
                  std::int64_t first_row, std::int64_t first_column);

// Pieces of at most piece_bytes of region.output each, in the order of rows and columns, that cover
// the region. Rows are cut between groups of scales only, so that piece_bytes must hold a group.
std::vector<RegionPiece> cut_region(const LoadRegion& region, std::int64_t piece_bytes);

class RegionReader {
 public:
  // `files` and `region` must outlive the reader. With `verify` the checksums of tensors that the
  // region covers whole are checked.
  RegionReader(const FileSet& files, const LoadRegion& region, bool verify);

  // Converts a piece into out, its elements in region.output without gaps. Calls must follow each
  // other in the order of cut_region(). InputError for a scale that check_scales refuses.
  void read(const RegionPiece& piece, void* out);
  // A piece of a region with a quantize_group: read into `values`, which it may resize, and rounded
  // as quantize_rows does. InputError as there.
  Int4Matrix read_rounded(const RegionPiece& piece, std::vector<float>& values);
  // After the last piece. InputError for a wrong checksum.
  void finish();
  // Host memory that the reader holds, in bytes, without the block scales of fp8.
  std::int64_t scratch_bytes() const;

 private:
  // Columns `columns` of `count` rows of `tensor`.
  struct Block {
    const StoredTensor& tensor;
    std::int64_t first_row = 0;
    std::int64_t count = 0;
    Range columns;
  };
  void read_block(const Block& block, void* out) const;
  void read_values(const RegionPiece& piece, std::int64_t per_element, void* out);
  void widen_piece(const RegionPiece& piece, void* out);
  void int4_piece(const RegionPiece& piece, void* out);
  void float8_piece(const RegionPiece& piece, void* out);
  void load_block_scales();
  void check_copied_scales(const RegionPiece& piece, const void* copied);

  const FileSet& files_;
  const LoadRegion& region_;
  bool verify_values_ = false;
  bool verify_scales_ = false;
  StreamingChecksum values_checksum_;
  StreamingChecksum scales_checksum_;
  std::vector<float> block_scales_;  // of kFloat8: [block rows, block columns]
  std::vector<std::uint32_t> words_;
  std::vector<std::byte> raw_;
  std::vector<std::byte> raw_scales_;
  std::vector<float> floats_;
  std::vector<float> scale_floats_;
};

}  // namespace kdtree
